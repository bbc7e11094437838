"""Diagnostics: what attention does while it trains, forward and backward.

Each name is imported when it is first used: `import attnscale` comes by here, and most programs need little of it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnscale.diagnostics.discovery import add_finder, find_attention
    from attnscale.diagnostics.monitor import Monitor
    from attnscale.diagnostics.records.record import Alert, Record, Summary
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
    from attnscale.diagnostics.thresholds import Thresholds
    from attnscale.diagnostics.views.observe import Inspection, observe

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

_HOMES = {
    "thresholds": ("Thresholds",),
    "discovery": ("add_finder", "find_attention"),
    "views.observe": ("Inspection", "observe"),
    "monitor": ("Monitor",),
    "records.record": ("Alert", "Record", "Summary"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'attnscale.diagnostics' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "sinks")
    return getattr(importlib.import_module(f"attnscale.diagnostics.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
