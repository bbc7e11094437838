"""Where records go: files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A monitor hands each sink the records and alerts of a step, numbers without tensors. A sink may import `records` and
`views`, never the monitor. Each is imported when it is first used, and its dependencies when it is made.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscale.diagnostics.records.jsonl import read_jsonl as read_jsonl
    from attnscale.diagnostics.sinks.base import AlertSink as AlertSink
    from attnscale.diagnostics.sinks.base import Sink as Sink
    from attnscale.diagnostics.sinks.console import ConsoleSink as ConsoleSink
    from attnscale.diagnostics.sinks.jsonl import JsonlSink as JsonlSink
    from attnscale.diagnostics.sinks.memory import MemorySink as MemorySink
    from attnscale.diagnostics.sinks.tensorboard import TensorBoardSink as TensorBoardSink
    from attnscale.diagnostics.sinks.trackers import MlflowSink as MlflowSink
    from attnscale.diagnostics.sinks.trackers import TrackerSink as TrackerSink

_HOMES = {
    "AlertSink": "sinks.base",
    "ConsoleSink": "sinks.console",
    "JsonlSink": "sinks.jsonl",
    "MemorySink": "sinks.memory",
    "MlflowSink": "sinks.trackers",
    "Sink": "sinks.base",
    "TensorBoardSink": "sinks.tensorboard",
    "TrackerSink": "sinks.trackers",
    "read_jsonl": "records.jsonl",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'attnscale.diagnostics.sinks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attnscale.diagnostics.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
