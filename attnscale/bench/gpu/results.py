"""Measurements as rows, as printed tables and as plots."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscale._util.optional import need
from attnscale.bench.gpu.machine import INTERPRETER
from attnscale.bench.gpu.problem import Card, Problem, work_of
from attnscale.bench.rows import Quartiles, Row, quartiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

SPEEDS = ("suite", "mode", "config", "n", "provider", "µs", "TFLOP/s", "GB/s", "roof", "MB", "over", "error")
# The interpreter runs numpy in a Python loop.
CHECKS = ("suite", "mode", "config", "n", "provider", "error", "host ms, meaningless")
ABOUT = (
    "over: time relative to the fastest baseline (1.00), in the same round. error: largest error relative to the bound "
    "(twice that of torch's SDPA, plus one rounding); providers above 1 are not timed."
)

# Wider than any table.
UNLIMITED = 10_000

COLOURS = {
    "attnscale": "#dc2626",
    "attnscale_split": "#be185d",
    "sdpa_flash": "#2563eb",
    "sdpa_cudnn": "#059669",
    "sdpa_efficient": "#0891b2",
    "sdpa_math": "#94a3b8",
    "flash_attn_2": "#7c3aed",
    "flash_attn_3": "#4c1d95",
    "flex": "#d97706",
    "eager": "#6b7280",
    "none": "#94a3b8",
    "lse+max": "#2563eb",
    "entropy": "#059669",
    "gap_adaptive": "#7c3aed",
    "gap_adaptive_blockwise": "#d97706",
}
ROOFLINE = "roofline"

# Minimum distance between names, in panel heights.
APART = 0.065


class Result(NamedTuple):
    """Measurements of a provider: seconds per round, peak memory in bytes, error relative to the allowed error."""

    provider: str
    seconds: list[float]
    peak: int | None
    error_share: float
    row_numbers: int = 0


def rows_of(
    suite: str,
    mode: str,
    problem: Problem,
    results: list[Result],
    baselines: tuple[str, ...],
    card: Card | None,
    labels: tuple[str, str, str],
) -> list[Row]:
    """Return one row per number; time ratios refer to the fastest baseline, which the metric names.

    The roofline share is available for known GPUs in half precision.
    """
    rivals = [result for result in results if result.provider in baselines]
    baseline = min(rivals, key=lambda result: quartiles(result.seconds).median, default=None)
    rows = []
    for result in results:
        numbers = metrics(mode, problem, result, card)
        if baseline is not None:
            # Within the same round: a slow-down of the machine affects both.
            ratios = [ours / theirs for ours, theirs in zip(result.seconds, baseline.seconds, strict=True)]
            numbers[f"time_over_{baseline.provider}"] = quartiles(ratios)
        rows += [
            Row(suite, result.provider, mode, metric, problem.keys, *number, *labels)
            for metric, number in numbers.items()
        ]
    return rows


def metrics(mode: str, problem: Problem, result: Result, card: Card | None) -> dict[str, Quartiles]:
    """Return median and quartiles by metric."""
    work = work_of(problem, mode, result.row_numbers)
    median, low, high = quartiles(result.seconds)
    rate = Quartiles(1 / median, 1 / high, 1 / low)  # the quartiles of a rate are in reverse order
    found = {
        "us": _scaled(Quartiles(median, low, high), 1e6),
        "tflops": _scaled(rate, work.flops / 1e12),
        "gb": _constant(work.bytes / 1e9),
        "gb_per_s": _scaled(rate, work.bytes / 1e9),
        "error_share": _constant(result.error_share),
    }
    if result.peak is not None:
        found["peak_mb"] = _constant(result.peak / 2**20)
    if card is not None and problem.dtype.itemsize == 2:
        found["roofline_share"] = _scaled(found["tflops"], 1 / card.attainable(work))
    return found


def _scaled(value: Quartiles, factor: float) -> Quartiles:
    return Quartiles(*(number * factor for number in value))


def _constant(value: float) -> Quartiles:
    return Quartiles(value, value, value)


def header(*, dry_run: bool) -> tuple[str, ...]:
    """Return the column names."""
    return CHECKS if dry_run else SPEEDS


def lines(rows: Sequence[Row], *, dry_run: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each table row, in the order of the measurements."""
    found: dict[tuple[str, str, str, int, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.kernel, row.mode, row.config, row.x, row.provider), {})[row.metric] = row.y
    for (suite, mode, config, n, provider), numbers in found.items():
        if "us" not in numbers:  # telemetry of the GPU
            continue
        where = suite, mode, short(config), str(n), provider
        error = f"{numbers['error_share']:.2f}"
        if dry_run:
            yield *where, error, f"{numbers['us'] / 1000:.0f}"
        else:
            yield *where, *_speeds(numbers), error


def _speeds(numbers: dict[str, float]) -> tuple[str, ...]:
    share, peak = numbers.get("roofline_share"), numbers.get("peak_mb")
    over = next((value for metric, value in numbers.items() if metric.startswith("time_over_")), None)
    return (
        f"{numbers['us']:.1f}",
        f"{numbers['tflops']:.1f}",
        f"{numbers['gb_per_s']:.0f}",
        "" if share is None else f"{share:.0%}",
        "" if peak is None else f"{peak:.0f}",
        "" if over is None else f"{over:.2f}",
    )


def short(config: str) -> str:
    """Shorten a configuration to head dimension and dtype."""
    return " ".join(part for part in config.split() if part.startswith("D=") or "float" in part)


def print_tables(
    console: Console, title: str, columns: tuple[str, ...], cells: Iterable[tuple[str, ...]], *, heading: int
) -> None:
    """Print one table per value of the first `heading` columns, its title; repeats in the next column are blank."""
    from rich import box
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    console.print(escape(title), highlight=False, soft_wrap=True)
    options = console.options.update(width=UNLIMITED)
    for shared, lines in itertools.groupby(cells, key=lambda line: line[:heading]):
        name = escape(" · ".join(part for part in shared if part))
        table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        held = [line[heading:] for line in lines]
        for index, column in enumerate(columns[heading:]):
            numbers = all(line[index][:1].isdigit() or not line[index] for line in held)
            table.add_column(column, justify="right" if numbers else "left", no_wrap=True)
        said = ""
        for first, *rest in held:
            table.add_row("" if first == said else escape(first), *map(escape, rest))
            said = first
        table.width = Measurement.get(console, options, table).maximum
        console.print(table, crop=False, soft_wrap=True)


class Picture(NamedTuple):
    """One file: a metric of a suite over the length, with a panel per mode, head dimension and dtype.

    The provider `beside` is omitted: it would flatten the other lines.
    """

    suite: str
    metric: str
    title: str
    unit: str
    beside: str = ""


CHARTS = (
    Picture("attention", "tflops", "Attention", "TFLOP/s"),
    Picture("statistics", "time_over_none", "Cost of statistics of every row", "time / time without", "eager"),
    Picture(
        "adaptive",
        "time_over_attnscale",
        "Cost of an adaptive temperature",
        "time / time of a length law",
        "gap_adaptive_blockwise",
    ),
    Picture("decode", "gb_per_s", "Decoding: one query over a KV cache", "GB/s"),
)


class Curve(NamedTuple):
    """A line of a panel: lengths, medians and quartiles."""

    name: str
    x: list[int]
    y: list[float]
    low: list[float]
    high: list[float]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG for each measured suite and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in CHARTS:
        chosen = [row for row in rows if row.kernel == chart.suite and row.provider != chart.beside]
        if any(row.metric == chart.metric for row in chosen):
            written.append(folder / f"{chart.suite}.png")
            _draw_chart(chart, chosen, written[-1])
    return written


def curves_of(rows: Sequence[Row], metric: str) -> list[Curve]:
    """Return a curve per provider, and the roofline if it is known."""
    curves = []
    for name in COLOURS:
        points = sorted((row for row in rows if (row.provider, row.metric) == (name, metric)), key=lambda row: row.x)
        if points:
            columns = ([getattr(row, column) for row in points] for column in ("x", "y", "low", "high"))
            curves.append(Curve(name, *columns))
    speeds = {(row.provider, row.x): row.y for row in rows if row.metric == metric}
    shares = [row for row in rows if row.metric == "roofline_share"]
    if shares and not metric.startswith("time_over"):
        roof = {row.x: speeds[row.provider, row.x] / row.y for row in shares}
        lengths = sorted(roof)
        heights = [roof[length] for length in lengths]
        curves.append(Curve(ROOFLINE, lengths, heights, heights, heights))
    return curves


def _draw_chart(chart: Picture, rows: list[Row], path: Path) -> None:
    """Draw modes as columns and configurations as rows; with one mode, configurations as columns."""
    matplotlib, figures = need("matplotlib", "plots", "bench"), need("matplotlib.figure", "plots", "bench")
    modes = list(dict.fromkeys(row.mode for row in rows))
    configs = list(dict.fromkeys(short(row.config) for row in rows))
    across, down = (len(modes), len(configs)) if len(modes) > 1 else (len(configs), 1)
    style: dict[Any, Any] = {"font.size": 9.5, "axes.edgecolor": "#9ca3af"}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = figures.Figure(figsize=(5.6 * across, 0.9 + 3.3 * down), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False).flat
        for axes, (config, mode) in zip(panels, itertools.product(configs, modes), strict=True):
            inside = [row for row in rows if row.mode == mode and short(row.config) == config]
            _draw_panel(axes, chart, curves_of(inside, chart.metric))
            axes.set_title(f"{mode}   {config}", loc="left", fontsize=10, color="#374151")
        device = rows[0].device
        figure.suptitle(f"{chart.title}\n{device}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        if device == INTERPRETER:
            figure.supxlabel("dry run in triton's interpreter: not GPU speeds", color="#dc2626")
        figure.savefig(path, dpi=160)


def _draw_panel(axes: Axes, chart: Picture, curves: list[Curve]) -> None:
    """Draw a line per provider with a band between its quartiles."""
    for curve in curves:
        colour, roofline = COLOURS.get(curve.name, "#9ca3af"), curve.name == ROOFLINE
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            curve.x,
            curve.y,
            color=colour,
            linewidth=2.6 if curve.name == "attnscale" else 1.7,
            linestyle=":" if roofline else "-",
            marker="" if roofline else "o",
            markersize=3.5,
        )
    lengths = sorted({x for curve in curves for x in curve.x})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_in_thousands(length) for length in lengths])
    axes.minorticks_off()
    highest, lowest = max(max(curve.high) for curve in curves), min(min(curve.low) for curve in curves)
    if chart.metric.startswith("time_over"):  # show the distance from 1
        axes.set_ylim(min(0.95, 0.98 * lowest), max(1.25, 1.04 * highest))
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_xlabel("keys, n")
    axes.set_ylabel(chart.unit)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    _name_lines(axes, curves)


def _name_lines(axes: Axes, curves: list[Curve]) -> None:
    """Write the names to the right of the panel, at the heights of the last points, without overlap."""
    bottom, top = axes.get_ylim()
    ends = sorted(((curve.y[-1] - bottom) / (top - bottom), curve.name) for curve in curves)
    places = [place for place, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + APART)
    limit = 1.0
    for index in reversed(range(len(places))):  # back down from the top
        places[index] = min(places[index], limit)
        limit = places[index] - APART
    for place, (_, name) in zip(places, ends, strict=True):
        weight = "bold" if name == "attnscale" else "normal"
        colour = COLOURS.get(name, "#9ca3af")
        axes.text(1.02, place, name, color=colour, transform=axes.transAxes, va="center", fontweight=weight)


def _in_thousands(length: int) -> str:
    """Format a length in multiples of 1024: 16384 is 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
