"""Where records go: files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A monitor hands each sink the records and alerts of a step, numbers without tensors. A sink may import `records` and
`views`, never the monitor. The packages it writes with are imported when it is made.
"""

from attnscale.diagnostics.records.jsonl import read_jsonl
from attnscale.diagnostics.sinks.base import AlertSink, Sink
from attnscale.diagnostics.sinks.console import ConsoleSink
from attnscale.diagnostics.sinks.jsonl import JsonlSink
from attnscale.diagnostics.sinks.memory import MemorySink
from attnscale.diagnostics.sinks.tensorboard import TensorBoardSink
from attnscale.diagnostics.sinks.trackers import MlflowSink, TrackerSink

__all__ = [
    "AlertSink",
    "ConsoleSink",
    "JsonlSink",
    "MemorySink",
    "MlflowSink",
    "Sink",
    "TensorBoardSink",
    "TrackerSink",
    "read_jsonl",
]
