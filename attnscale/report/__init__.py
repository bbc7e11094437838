"""A run of the monitor as one self-contained HTML page.

`data` reads the records of a JSONL file, `encode` packs their numbers, `page` puts them with the programs in `assets/`
into one file. Imports `diagnostics` (records, and the labels and colours of `views.display`).
"""

from attnscale.report.data import Run, read_run
from attnscale.report.page import build_page, write_report

__all__ = ["Run", "build_page", "read_run", "write_report"]
