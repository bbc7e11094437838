"""Where records go."""

from attnscale.diagnostics.sinks.base import AlertSink, Sink
from attnscale.diagnostics.sinks.console import ConsoleSink
from attnscale.diagnostics.sinks.jsonl import JsonlSink, read_jsonl
from attnscale.diagnostics.sinks.memory import MemorySink
from attnscale.diagnostics.sinks.mlflow import MlflowSink
from attnscale.diagnostics.sinks.tensorboard import TensorBoardSink
from attnscale.diagnostics.sinks.tracker import TrackerSink

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
