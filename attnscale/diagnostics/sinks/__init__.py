"""Where records go."""

from attnscale.diagnostics.sinks.base import AlertSink, Sink
from attnscale.diagnostics.sinks.jsonl import JsonlSink, read_jsonl
from attnscale.diagnostics.sinks.memory import MemorySink

__all__ = ["AlertSink", "JsonlSink", "MemorySink", "Sink", "read_jsonl"]
