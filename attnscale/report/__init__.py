"""Self-contained HTML pages of monitored runs and of evaluations.

Run of a monitor: `data` reads the file into a `run`, `encoding` compresses its values, `page` combines them with the
scripts in `assets/`, `terms` explains the words of both kinds of page.
Evaluation: `evaluation_data` reads the folder, `evaluation_charts` defines the charts (`chart`), `verdict` summarises
the results for page and terminal, `evaluation_page` builds the page.
`drawing` renders a chart as SVG or PNG; `write` writes the files. Imports `diagnostics` (records, labels, colours) and
`lab` (tasks).
"""

from attnscale.report.data import read_run
from attnscale.report.evaluation_data import EvaluationData, read_evaluation
from attnscale.report.evaluation_page import build_evaluation_page
from attnscale.report.page import build_page
from attnscale.report.run import Run
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
