"""Diagnostics: attention statistics of a model during training, forward and backward. README.md is the guide.

A monitor attaches a tap to each attention module. A listener per layer measures the calls. Records go to sinks and
views. Imports `call`, `statistics` and `module`. `import attnscale` does not import this package, because most programs
do not use a monitor.
"""

from typing import TYPE_CHECKING

from attnscale.diagnostics import actions as actions
from attnscale.diagnostics import sinks
from attnscale.diagnostics.events import EventLog, Thresholds
from attnscale.diagnostics.monitor import Monitor, add_finder, find_attention
from attnscale.diagnostics.qk_clip import Clipped, QKClip
from attnscale.diagnostics.records.record import Event, Progress, Record, RunInfo, Summary
from attnscale.diagnostics.sinks import *  # noqa: F403  # all sinks
from attnscale.diagnostics.tracking import MaxLogits
from attnscale.diagnostics.views.observe import Observation, observe

__all__ = [
    "Clipped",
    "Event",
    "EventLog",
    "MaxLogits",
    "Monitor",
    "Observation",
    "Progress",
    "QKClip",
    "Record",
    "RunInfo",
    "Summary",
    "Thresholds",
    "add_finder",
    "find_attention",
    "observe",
]
if not TYPE_CHECKING:
    __all__ += sinks.__all__

    def __getattr__(name: str) -> object:
        moved = "; it was renamed to attnscale.diagnostics.Observation" if name == "Inspection" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{moved}")
