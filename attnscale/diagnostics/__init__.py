"""Diagnostics: what attention does while a model trains, forward and backward. README.md is the guide.

A monitor puts a tap into each attention module; listeners measure its calls; records go to sinks and views. Imports
`call`, `statistics` and `module`. Sinks are imported when first used, since `import attnscale` imports this package.
"""

from typing import TYPE_CHECKING

from attnscale.diagnostics import sinks
from attnscale.diagnostics.discovery import add_finder, find_attention
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records.record import Alert, Record, Summary
from attnscale.diagnostics.thresholds import Thresholds
from attnscale.diagnostics.views.observe import Inspection, observe

if TYPE_CHECKING:
    from attnscale.diagnostics.sinks import (
        AlertSink,
        ConsoleSink,
        JsonlSink,
        MemorySink,
        MlflowSink,
        Sink,
        TensorBoardSink,
        TrackerSink,
        read_jsonl,
    )

__all__ = [
    "Alert",
    "AlertSink",
    "ConsoleSink",
    "Inspection",
    "JsonlSink",
    "MemorySink",
    "MlflowSink",
    "Monitor",
    "Record",
    "Sink",
    "Summary",
    "TensorBoardSink",
    "Thresholds",
    "TrackerSink",
    "add_finder",
    "find_attention",
    "observe",
    "read_jsonl",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'attnscale.diagnostics' has no attribute {name!r}")
    return getattr(sinks, name)


def __dir__() -> list[str]:
    return sorted(__all__)
