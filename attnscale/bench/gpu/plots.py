"""Pictures of the rows: speed over length, what statistics and adapting cost, and decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscale._util.optional import need
from attnscale.bench.gpu.machine import INTERPRETER
from attnscale.bench.gpu.tables import short
from attnscale.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

# Names may not be nearer to each other than this, in heights of the panel.
APART = 0.065


class Chart(NamedTuple):
    """One file: a metric of a suite over the length, a panel for each mode, head dimension and dtype.

    A provider that is `beside` the question would only flatten the others.
    """

    suite: str
    metric: str
    title: str
    unit: str
    beside: str = ""


CHARTS = (
    Chart("attention", "tflops", "Attention", "TFLOP/s"),
    Chart("statistics", "time_over_none", "What statistics of every row cost", "time over that without", "eager"),
    Chart(
        "adaptive",
        "time_over_attnscale",
        "What an adaptive temperature costs",
        "time over a law of the length",
        "gap_adaptive_blockwise",
    ),
    Chart("decode", "gb_per_s", "One query against a cache", "GB/s"),
)


class Curve(NamedTuple):
    """A line of a panel: lengths, and the median with its quartiles at each."""

    name: str
    x: list[int]
    y: list[float]
    low: list[float]
    high: list[float]


def check_matplotlib() -> None:
    """Say what to install, before anything is measured."""
    need("matplotlib", "plots", "bench")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG for each suite that was measured, and say which."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in CHARTS:
        chosen = [row for row in rows if row.kernel == chart.suite and row.provider != chart.beside]
        if any(row.metric == chart.metric for row in chosen):
            written.append(folder / f"{chart.suite}.png")
            _draw_chart(chart, chosen, written[-1])
    return written


def curves_of(rows: Sequence[Row], metric: str) -> list[Curve]:
    """A curve for each provider; and the roofline, where speeds are known as a share of it."""
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


def _draw_chart(chart: Chart, rows: list[Row], path: Path) -> None:
    """Modes from left to right and configurations downwards; configurations from left to right if there is one mode."""
    import matplotlib
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(row.mode for row in rows))
    configs = list(dict.fromkeys(short(row.config) for row in rows))
    across, down = (len(modes), len(configs)) if len(modes) > 1 else (len(configs), 1)
    style: dict[Any, Any] = {"font.size": 9.5, "axes.edgecolor": "#9ca3af"}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.6 * across, 0.9 + 3.3 * down), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False).flat
        for axes, (config, mode) in zip(panels, itertools.product(configs, modes), strict=True):
            inside = [row for row in rows if row.mode == mode and short(row.config) == config]
            _draw_panel(axes, chart, curves_of(inside, chart.metric))
            axes.set_title(f"{mode}   {config}", loc="left", fontsize=10, color="#374151")
        device = rows[0].device
        figure.suptitle(f"{chart.title}\n{device}", x=0.01, ha="left", fontsize=11.5, fontweight="bold")
        if device == INTERPRETER:
            figure.supxlabel("dry run in triton's interpreter: these are not speeds of a GPU", color="#dc2626")
        figure.savefig(path, dpi=160)


def _draw_panel(axes: Axes, chart: Chart, curves: list[Curve]) -> None:
    """A line for each provider with a band between its quartiles."""
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
    if chart.metric.startswith("time_over"):  # what matters is the distance from 1
        axes.set_ylim(min(0.95, 0.98 * lowest), max(1.25, 1.04 * highest))
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_xlabel("keys, n")
    axes.set_ylabel(chart.unit)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    _name_lines(axes, curves)


def _name_lines(axes: Axes, curves: list[Curve]) -> None:
    """Write each name right of the panel, at the height of the line's last point, moved apart where they meet."""
    bottom, top = axes.get_ylim()
    ends = sorted(((curve.y[-1] - bottom) / (top - bottom), curve.name) for curve in curves)
    places = [place for place, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + APART)
    limit = 1.0
    for index in reversed(range(len(places))):  # back down from the top, as far as they push each other
        places[index] = min(places[index], limit)
        limit = places[index] - APART
    for place, (_, name) in zip(places, ends, strict=True):
        weight = "bold" if name == "attnscale" else "normal"
        colour = COLOURS.get(name, "#9ca3af")
        axes.text(1.02, place, name, color=colour, transform=axes.transAxes, va="center", fontweight=weight)


def _in_thousands(length: int) -> str:
    """How lengths are usually named: 16384 is 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
