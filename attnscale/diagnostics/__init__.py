"""Diagnostics: what attention does while it trains, forward and backward."""

from attnscale.diagnostics.alerts import Thresholds
from attnscale.diagnostics.discovery import add_finder, find_attention
from attnscale.diagnostics.inspection import Inspection, observe
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records import Alert, Record, Summary
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
