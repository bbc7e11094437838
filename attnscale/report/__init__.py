"""A run of the monitor, or the folder of an evaluation, as one self-contained HTML page.

Of a run, `data` reads the records of a JSONL file, `encode` packs their numbers, `page` puts them with the programs in
`assets/` into one file. Of an evaluation, `evaluation_data` reads the folder, `comparisons` takes from it what is
shown, `verdict` says it in two sentences, `evaluation_charts` draws it (`svg`, `axes`, `policy_style`),
`evaluation_page`, `evaluation_table` and `evaluation_maps` make the page, `evaluation_pictures` the PNGs.
`write` decides which. Imports `diagnostics` (records, and the labels and colours of `views.display`).
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
