"""Where records go; each sink is imported when it is first used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_HOMES = {
    "base": ("AlertSink", "Sink"),
    "console": ("ConsoleSink",),
    "jsonl": ("JsonlSink", "read_jsonl"),
    "memory": ("MemorySink",),
    "mlflow": ("MlflowSink",),
    "tensorboard": ("TensorBoardSink",),
    "tracker": ("TrackerSink",),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"attnscale.diagnostics.sinks.{home}"), name)
    raise AttributeError(f"module 'attnscale.diagnostics.sinks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
