"""Diagnostics: what attention does while a model trains, forward and backward. README.md is the guide.

A monitor puts a tap into each attention module; listeners measure its calls; records go to sinks and views. Imports
`call`, `statistics` and `module`. `import attnscale` does not import this package: most programs have no monitor.
"""

from attnscale.diagnostics import sinks
from attnscale.diagnostics.discovery import add_finder, find_attention
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records.record import Alert, Record, Summary
from attnscale.diagnostics.sinks import *  # noqa: F403  # its list of names is the only one
from attnscale.diagnostics.thresholds import Thresholds
from attnscale.diagnostics.views.observe import Inspection, observe

__all__ = [
    "Alert",
    "Inspection",
    "Monitor",
    "Record",
    "Summary",
    "Thresholds",
    "add_finder",
    "find_attention",
    "observe",
]
__all__ += sinks.__all__
