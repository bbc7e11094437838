"""Diagnostics: what attention does while a model trains, forward and backward. README.md is the guide.

A monitor puts a tap into each attention module; listeners measure its calls; records go to sinks and views. Imports
`call`, `statistics` and `module`. `import attnscale` does not import this package: most programs have no monitor.
"""

from typing import TYPE_CHECKING

from attnscale.diagnostics import sinks
from attnscale.diagnostics.alerts import Thresholds
from attnscale.diagnostics.monitor import Monitor, add_finder, find_attention
from attnscale.diagnostics.records.record import Alert, Record, Summary
from attnscale.diagnostics.sinks import *  # noqa: F403  # every sink there is
from attnscale.diagnostics.views.observe import Observation, observe

__all__ = [
    "Alert",
    "Monitor",
    "Observation",
    "Record",
    "Summary",
    "Thresholds",
    "add_finder",
    "find_attention",
    "observe",
]
if not TYPE_CHECKING:
    __all__ += sinks.__all__

    def __getattr__(name: str) -> object:
        moved = ": attnscale.diagnostics.Observation is its name now" if name == "Inspection" else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{moved}")
