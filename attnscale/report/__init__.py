"""A run of the monitor as one HTML page."""

from attnscale.report.data import Run, read_run
from attnscale.report.page import build_page, write_report

__all__ = ["Run", "build_page", "read_run", "write_report"]
