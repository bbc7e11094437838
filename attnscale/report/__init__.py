"""A run of the monitor, or the folder of an evaluation, as one self-contained HTML page.

Of a run, `data` reads the records of a JSONL file, and `page` puts their numbers with the programs in `assets/` into
one file. Of an evaluation, `evaluation_data` reads the folder, `evaluation_charts` describes its charts (`chart`),
`verdict` sums it up in two sentences, and `evaluation_page` makes the page. `drawing` draws a chart as SVG or PNG, and
`write` writes the files. Imports `diagnostics` (records, labels and colours) and `lab` (the tasks).
"""

from attnscale.report.data import Run, read_run
from attnscale.report.evaluation_data import EvaluationData, read_evaluation
from attnscale.report.evaluation_page import build_evaluation_page
from attnscale.report.page import build_page
from attnscale.report.write import write_report

__all__ = [
    "EvaluationData",
    "Run",
    "build_evaluation_page",
    "build_page",
    "read_evaluation",
    "read_run",
    "write_report",
]
