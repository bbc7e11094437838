"""`attnscale report`: the page of a monitor's run, or of the folder of an evaluation."""

from __future__ import annotations

import logging
from pathlib import Path

from attnscale._util.files import write_whole
from attnscale.errors import ArgumentError, MissingDependencyError, reject
from attnscale.report.chart import Chart
from attnscale.report.data import read_run
from attnscale.report.drawing import png
from attnscale.report.evaluation_charts import criticality_chart, task_chart, trade_chart
from attnscale.report.evaluation_data import PROSE, read_evaluation
from attnscale.report.evaluation_page import build_evaluation_page
from attnscale.report.page import build_page

logger = logging.getLogger(__name__)

TITLE = "<title>attnscale · "  # in the first lines of every page


def write_report(path: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a JSONL run, by default RUN.html beside RUN.jsonl, or of an evaluation's folder, report.html.

    Where no output is named, only an earlier page is replaced. If the page goes into the folder, the pictures of
    `write_pictures` go beside it, unless matplotlib is not installed. On an error no file is written or changed.
    """
    path = Path(path)
    folder = path.is_dir()
    named = output is not None
    beside = path / "report.html" if folder else path.with_name(f"{path.name.removesuffix('.jsonl')}.html")
    output = beside if output is None else Path(output)
    if output.is_dir():
        reject("output", str(output), "an HTML file, not a directory")
    if not folder and output.exists() and path.exists() and output.samefile(path):
        reject("output", str(output), "another file than the one with the records")
    if folder and output.suffix in (".csv", ".json") and output.parent.resolve() == path.resolve():
        reject("output", str(output), "another file than those of the evaluation")
    if not named and output.exists() and not _is_page(output):
        raise ArgumentError(
            f"{str(output)!r} exists and is no page of attnscale: name another output, or this one to replace it"
        )
    text = build_evaluation_page(read_evaluation(path)) if folder else build_page(read_run(path))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error
    if folder and output.parent.resolve() == path.resolve():
        try:
            write_pictures(path)
        except MissingDependencyError as error:
            logger.info("no pictures: %s", error)
    return output


def write_pictures(folder: str | Path) -> list[Path]:
    """Write accuracy.png, pareto.png and criticality.png into the folder of an evaluation: charts of its page.

    A picture whose numbers were not measured is left out; the list has those that were written. All are drawn before
    the first is written.
    """
    data = read_evaluation(folder)
    first = data.retrieval_tasks[:1]
    charts: dict[str, list[Chart | None]] = {
        "accuracy.png": [task_chart(data, task) for task in data.tasks if task in (*first, PROSE)],
        "pareto.png": [trade_chart(data, task) for task in first],
        "criticality.png": [criticality_chart(data, task) for task in first],
    }
    shown = {name: [chart for chart in some if chart is not None] for name, some in charts.items()}
    drawn = {data.path / name: png(*some) for name, some in shown.items() if some}
    for target, content in drawn.items():
        try:
            write_whole(target, content)
        except OSError as error:
            raise ArgumentError(f"path={str(target)!r} cannot be written: {error.strerror}") from error
    return list(drawn)


def _is_page(file: Path) -> bool:
    try:
        with file.open("rb") as start:
            return TITLE.encode() in start.read(1024)
    except OSError:
        return False
