"""Where records go: files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A monitor hands each sink the records and alerts of a step, numbers without tensors. A sink may import `records` and
`views`, never the monitor. Each is imported when it is first used, and its dependencies when it is made.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscale.diagnostics.records.jsonl import read_jsonl
    from attnscale.diagnostics.sinks.base import AlertSink, Sink
    from attnscale.diagnostics.sinks.console import ConsoleSink
    from attnscale.diagnostics.sinks.jsonl import JsonlSink
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

_HOMES = {
    "base": ("AlertSink", "Sink"),
    "console": ("ConsoleSink",),
    "jsonl": ("JsonlSink",),
    "memory": ("MemorySink",),
    "mlflow": ("MlflowSink",),
    "tensorboard": ("TensorBoardSink",),
    "tracker": ("TrackerSink",),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'attnscale.diagnostics.sinks' has no attribute {name!r}")
    home = next((f"sinks.{home}" for home, names in _HOMES.items() if name in names), "records.jsonl")
    return getattr(importlib.import_module(f"attnscale.diagnostics.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
