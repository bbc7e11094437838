"""`attnscale report`: writes the page of a monitored run, of several runs, or of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from attnscale._util.files import write_whole
from attnscale.errors import ArgumentError, MissingDependencyError, reject
from attnscale.report.calibration_page import build_calibration_page, is_calibration, read_calibration
from attnscale.report.chart import Chart
from attnscale.report.data import read_run
from attnscale.report.drawing import png
from attnscale.report.evaluation_charts import criticality_chart, task_chart, trade_chart
from attnscale.report.evaluation_data import PROSE, read_evaluation
from attnscale.report.evaluation_page import build_evaluation_page
from attnscale.report.page import build_page, labels

logger = logging.getLogger(__name__)

TITLE = "<title>attnscale · "  # identifies attnscale pages


def write_report(path: str | Path | Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the HTML page of a monitored run, an evaluation or a calibration, or a page that compares several runs.

    A page written into the folder of an evaluation is accompanied by the pictures of `write_pictures`, if matplotlib is
    installed. On an exception no file is written or changed.

    Args:
        path: JSONL file of a monitor, a sequence of such files, or output folder of `attnscale evaluate`
            or `attnscale calibrate`.
        output: HTML file; by default RUN.html next to RUN.jsonl, A_vs_B.html next to the first of several files, or
            report.html in the folder. The default only replaces an earlier page.

    Returns:
        The path of the page.

    Raises:
        ArgumentError: the path cannot be read, or the output cannot be written or would replace another kind of file.

    Example:
        >>> import tempfile
        >>> import attnscale, torch
        >>> from attnscale.diagnostics import JsonlSink
        >>> model = attnscale.MultiheadAttention(16, 2, batch_first=True, policy="log")
        >>> x = torch.randn(1, 8, 16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     monitor = attnscale.Monitor(model, every=1, sinks=[JsonlSink(f"{folder}/run.jsonl")])
        ...     _ = model(x, x, x), monitor.step(0), monitor.close()
        ...     write_report(f"{folder}/run.jsonl").name
        'run.html'
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(one) for one in path]
    folder = _check_paths(paths)
    named = output is not None
    output = Path(output) if output is not None else _beside(paths)
    if output.is_dir():
        reject("output", str(output), "an HTML file, not a directory")
    if any(output.exists() and one.exists() and output.samefile(one) for one in paths):
        reject("output", str(output), "a file other than the JSONL file")
    if folder and output.suffix in (".csv", ".json") and output.parent.resolve() == paths[0].resolve():
        reject("output", str(output), "a file other than those of the evaluation")
    if not named and output.exists() and not _is_page(output):
        raise ArgumentError(
            f"{str(output)!r} exists and is not an attnscale page: pass another output, or this one to replace it"
        )
    calibration = folder and is_calibration(paths[0])
    if calibration:
        text = build_calibration_page(read_calibration(paths[0]))
    else:
        text = build_evaluation_page(read_evaluation(paths[0])) if folder else build_page(*map(read_run, paths))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error
    if folder and not calibration and output.parent.resolve() == paths[0].resolve():
        try:
            write_pictures(paths[0])
        except MissingDependencyError as error:
            logger.info("no pictures: %s", error)
    return output


def _check_paths(paths: list[Path]) -> bool:
    """Return whether the only path is a folder."""
    if not paths:
        reject("path", paths, "at least one file")
    if len(paths) == 1:
        return paths[0].is_dir()
    for number, path in enumerate(paths):
        if path.is_dir():
            reject("path", str(path), "JSONL files of records, if there are several paths")
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            reject("path", str(path), "each file once")
    return False


def _beside(paths: list[Path]) -> Path:
    """Return the default output."""
    if paths[0].is_dir():
        return paths[0] / "report.html"
    names = [name.removesuffix(".jsonl").replace("/", "-") for name in labels([str(path) for path in paths])]
    more = [f"{len(names) - 2}_more"] if len(names) > 3 else []
    shown = names[:2] + more if more else names
    return paths[0].with_name(f"{'_vs_'.join(shown)}.html")


def write_pictures(folder: str | Path) -> list[Path]:
    """Write charts of the page as accuracy.png, pareto.png and criticality.png into the folder of an evaluation.

    Pictures without measurements are skipped. All pictures are drawn before the first is written. Returns the paths.
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
