"""Where records go: files, TensorBoard, W&B, Trackio, MLflow, the terminal, memory.

A sink is a class in a module of this folder with a name that ends in "Sink": it is found there, and exported from here
and from `attnscale.diagnostics`. A monitor hands it the records and alerts of a step, numbers without tensors. A sink
may import `records` and `views`, never the monitor; the packages it writes with are imported when it is made.
"""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.records.record import read_jsonl as read_jsonl

if TYPE_CHECKING:  # the types of those below
    from attnscale.diagnostics.sinks.console import ConsoleSink as ConsoleSink
    from attnscale.diagnostics.sinks.jsonl import JsonlSink as JsonlSink
    from attnscale.diagnostics.sinks.memory import MemorySink as MemorySink
    from attnscale.diagnostics.sinks.tensorboard import TensorBoardSink as TensorBoardSink
    from attnscale.diagnostics.sinks.trackers import MlflowSink as MlflowSink
    from attnscale.diagnostics.sinks.trackers import TrackerSink as TrackerSink


@runtime_checkable
class Sink(Protocol):
    """Takes records. Only the first process of a run uses it; an exception drops the sink and never stops the run."""

    def log(self, records: Sequence[Record], step: int) -> None:
        """Take the records of a step, one per layer and head."""

    def close(self) -> None:
        """End of the run."""


@runtime_checkable
class AlertSink(Sink, Protocol):
    """A sink that takes alerts too."""

    def alert(self, alerts: Sequence[Alert], step: int) -> None:
        """Take the alerts of a step."""


if not TYPE_CHECKING:
    _MODULES = tuple(import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__))
    _SINKS = {name: found for module in _MODULES for name, found in vars(module).items() if name.endswith("Sink")}
    __all__ = sorted(["AlertSink", "Sink", *_SINKS, "read_jsonl"])

    def __getattr__(name: str) -> Any:
        if name in _SINKS:
            return _SINKS[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
