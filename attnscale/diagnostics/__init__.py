"""Diagnostics: what attention does while it trains, forward and backward."""

from attnscale.diagnostics.alerts import Thresholds
from attnscale.diagnostics.discovery import add_finder, find_attention
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records import Alert, Record, Summary
from attnscale.diagnostics.sinks import AlertSink, JsonlSink, MemorySink, Sink, read_jsonl

__all__ = [
    "Alert",
    "AlertSink",
    "JsonlSink",
    "MemorySink",
    "Monitor",
    "Record",
    "Sink",
    "Summary",
    "Thresholds",
    "add_finder",
    "find_attention",
    "read_jsonl",
]
