"""Pictures of the rows: speed over length, what statistics and adapting cost, and decoding."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscale.bench.gpu.machine import INTERPRETER
from attnscale.bench.gpu.report import short
from attnscale.bench.rows import Row
from attnscale.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "attnscale": "#dc2626",
    "attnscale_split": "#be185d",
    "attnscale_paged": "#ea580c",
    "sdpa_flash": "#2563eb",
    "sdpa_cudnn": "#059669",
    "sdpa_efficient": "#0891b2",
    "sdpa_math": "#94a3b8",
    "flash_attn": "#7c3aed",
    "flex": "#d97706",
    "eager": "#6b7280",
    "none": "#94a3b8",
    "lse+max": "#2563eb",
    "entropy": "#059669",
    "entropy+squares": "#d97706",
    "gap_adaptive": "#7c3aed",
    "gap_adaptive_blockwise": "#d97706",
}
# Names may not be nearer to each other than this, in heights of the panel.
APART = 0.065


class Chart(NamedTuple):
    """One file: a metric of a suite over the length, a panel for each mode, head dimension and dtype."""

    suite: str
    metric: str
    title: str
    unit: str


CHARTS = (
    Chart("attention", "tflops", "Attention", "TFLOP/s"),
    Chart("statistics", "time_over_none", "What statistics of every row cost", "time over attention without"),
    Chart("adaptive", "time_over_attnscale", "What an adaptive temperature costs", "time over a law of the length"),
    Chart("decode", "gb_per_s", "One query against a cache", "GB/s"),
)


class Curve(NamedTuple):
    """The points of a provider: lengths, medians and quartiles."""

    provider: str
    rows: list[Row]


def check_matplotlib() -> None:
    """Say what to install, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib: pip install 'attnscale[bench]'")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a PNG for each suite that was measured, and say which."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in CHARTS:
        chosen = [row for row in rows if row.kernel == chart.suite and row.metric == chart.metric]
        if chosen:
            written.append(folder / f"{chart.suite}.png")
            _draw_chart(chart, chosen, written[-1])
    return written


def _draw_chart(chart: Chart, rows: list[Row], path: Path) -> None:
    """Modes from left to right, head dimensions and dtypes downwards."""
    import matplotlib
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(row.mode for row in rows))
    configs = list(dict.fromkeys(short(row.config) for row in rows))
    style: dict[Any, Any] = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#9ca3af",
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.6 * len(modes), 0.7 + 3.3 * len(configs)), layout="constrained")
        panels = figure.subplots(len(configs), len(modes), squeeze=False)
        for (down, config), (across, mode) in itertools.product(enumerate(configs), enumerate(modes)):
            inside = [row for row in rows if row.mode == mode and short(row.config) == config]
            curves = [Curve(name, [row for row in inside if row.provider == name]) for name in COLOURS]
            _draw_panel(panels[down, across], chart, [curve for curve in curves if curve.rows])
            panels[down, across].set_title(f"{mode}   {config}", loc="left", fontsize=10, color="#374151")
        device = rows[0].device
        figure.suptitle(f"{chart.title}, {device}", x=0.01, ha="left", fontsize=12, fontweight="bold")
        if device == INTERPRETER:
            figure.supxlabel("dry run in triton's interpreter: these are not speeds of a GPU", color="#dc2626")
        figure.savefig(path, dpi=160)


def _draw_panel(axes: Axes, chart: Chart, curves: list[Curve]) -> None:
    """A line for each provider with a band between its quartiles."""
    lengths = sorted({row.x for curve in curves for row in curve.rows})
    for provider, rows in curves:
        ordered = sorted(rows, key=lambda row: row.x)
        x = [row.x for row in ordered]
        width = 2.6 if provider == "attnscale" else 1.7
        axes.fill_between(
            x,
            [row.low for row in ordered],
            [row.high for row in ordered],
            color=COLOURS[provider],
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(x, [row.y for row in ordered], color=COLOURS[provider], linewidth=width, marker="o", markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_in_thousands(length) for length in lengths])
    axes.minorticks_off()
    top = 1.08 * max(row.high for curve in curves for row in curve.rows)
    axes.set_ylim(0, max(top, 1.25) if chart.metric.startswith("time_over") else top)
    axes.set_xlabel("keys, n")
    axes.set_ylabel(chart.unit)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    _name_lines(axes, curves)


def _name_lines(axes: Axes, curves: list[Curve]) -> None:
    """Write each provider's name right of the panel, at the height of its last point, moved apart where they meet."""
    height = axes.get_ylim()[1]
    ends = sorted((max(curve.rows, key=lambda row: row.x).y / height, curve.provider) for curve in curves)
    places = [place for place, _ in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + APART)
    excess = max(0.0, places[-1] - 1.0)
    for index in reversed(range(len(places))):  # back down from the top, as far as they push each other
        ceiling = places[index + 1] - APART if index + 1 < len(places) else places[index] - excess
        places[index] = min(places[index], ceiling)
    for place, (_, provider) in zip(places, ends, strict=True):
        axes.text(
            1.02,
            place,
            provider,
            color=COLOURS[provider],
            transform=axes.transAxes,
            va="center",
            fontweight="bold" if provider == "attnscale" else "normal",
        )


def _in_thousands(length: int) -> str:
    """How lengths are usually named: 16384 is 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
