"""Pictures of an evaluation as PNG, for a README: accuracy and prose over length, the trade-off, recall against r."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.errors import ArgumentError
from attnscale.report.axes import COLOURS, logarithmic
from attnscale.report.comparisons import Curves, critical_points, curves, rank_correlation, trades
from attnscale.report.evaluation_charts import style_of
from attnscale.report.evaluation_data import ARGMAX, BITS, PERPLEXITY, EvaluationData, read_evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS = 200  # per inch: 9 inches are 1800 pixels, twice what GitHub shows
LOOK = {
    "font.size": 11.0,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a94a3",
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e8ee",
    "xtick.color": "#46505e",
    "ytick.color": "#46505e",
    "legend.frameon": False,
}


def write_pictures(folder: str | Path) -> list[Path]:
    """Write accuracy.png, pareto.png and criticality.png into the folder of an evaluation.

    A picture whose numbers were not measured is left out; the list has those that were written. All are drawn before
    the first is written.
    """
    data = read_evaluation(folder)
    matplotlib, figures = (need(name, "pictures", "report") for name in ("matplotlib", "matplotlib.figure"))
    drawn: dict[str, bytes] = {}
    drawings = {"accuracy.png": _accuracy, "pareto.png": _pareto, "criticality.png": _criticality}
    with matplotlib.rc_context(LOOK):
        for name, draw in drawings.items():
            figure = draw(data, figures.Figure)
            if figure is not None:
                file = io.BytesIO()
                figure.savefig(file, format="png", dpi=PIXELS, facecolor="white", bbox_inches="tight", pad_inches=0.1)
                drawn[name] = file.getvalue()
    written = []
    for name, content in drawn.items():
        target = data.path / name
        try:
            write_whole(target, content)
        except OSError as error:
            raise ArgumentError(f"path={str(target)!r} cannot be written: {error.strerror}") from error
        written.append(target)
    return written


def _accuracy(data: EvaluationData, make: Callable[..., Figure]) -> Figure | None:
    """Left retrieval, right prose."""
    panels: list[tuple[str, str, Curves]] = []
    for task in data.retrieval_tasks[:1]:
        title = f"Questions answered, {task.replace('_', ' ')}"
        panels.append((title, "share", curves(data, task, "accuracy")))
    prose = {policy: own for policy, own in curves(data, PERPLEXITY, BITS).items() if policy != ARGMAX}
    if prose:
        panels.append(("Bits per byte of prose, less is better", "bits", prose))
    if not panels:
        return None
    figure = make(figsize=(4.5 * len(panels), 3.7), layout="constrained")
    for axes, (title, unit, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for policy, own in found.items():
            known = [one for one in own if one.low is not None and one.high is not None]
            look = _look(data, policy)
            axes.plot([one.place for one in own], [one.value for one in own], label=policy, **look)
            ends = [[one.low for one in known], [one.high for one in known]]
            axes.fill_between([one.place for one in known], *ends, color=look["color"], alpha=0.13, linewidth=0)
        axes.set_title(title)
        if unit == "share":
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        _lengths(axes, data, trained_at=0.0 if unit == "share" else 0.9)
    _legend(figure)
    return figure


def _pareto(data: EvaluationData, make: Callable[..., Figure]) -> Figure | None:
    found = trades(data, data.retrieval_tasks[0]) if data.retrieval_tasks else []
    if not found:
        return None
    figure = make(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(trade.policy for trade in found):
        own = [trade for trade in found if trade.policy == policy]
        x, y = [trade.lost.value for trade in own], [100 * trade.gained.value for trade in own]
        look = _look(data, policy)
        axes.plot(x, y, label=policy, **look)
        name = look["color"]
        axes.annotate(
            f"{own[-1].length}", (x[-1], y[-1]), xytext=(7, 3), textcoords="offset points", fontsize=9.5, color=name
        )
    axes.axhline(0, color="#46505e", linewidth=0.8)
    axes.axvline(0, color="#46505e", linewidth=0.8)
    place: dict[str, Any] = {
        "xycoords": ("axes fraction", "data"),
        "xytext": (-4, 4),
        "textcoords": "offset points",
        "ha": "right",
    }
    axes.annotate("constant", (1, 0), fontsize=9.5, color="#46505e", **place)
    axes.set_title("Gained in retrieval against lost in prose, a point per length (better: up and to the left)")
    axes.set_xlabel("bits per byte lost against constant")
    axes.set_ylabel("percentage points gained")
    _legend(figure)
    return figure


def _criticality(data: EvaluationData, make: Callable[..., Figure]) -> Figure | None:
    found, relative = critical_points(data, data.retrieval_tasks[0]) if data.retrieval_tasks else ([], False)
    if not found:
        return None
    figure = make(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(one.policy for one in found):
        own = [one for one in found if one.policy == policy]
        look = _look(data, policy) | {"linestyle": "none", "alpha": 0.8}
        axes.plot([one.criticality for one in own], [one.recall for one in own], label=policy, **look)
    axes.set_xscale("log")
    scale = logarithmic("", [one.criticality for one in found], also=1.0)
    axes.set_xlim(scale.low, scale.high)
    axes.set_xticks([tick.value for tick in scale.ticks], [tick.text for tick in scale.ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color="#46505e", linewidth=1, linestyle="--")
    axes.annotate("r = 1", (1, 1), xycoords=("data", "axes fraction"), xytext=(5, -10), textcoords="offset points")
    axes.set_ylim(bottom=0)
    rho = rank_correlation([(one.criticality, one.recall) for one in found])
    axes.set_title("Recall against criticality" + ("" if rho is None else f", rank correlation {rho:.2f}"))
    axes.set_xlabel("criticality r = β/Λ of the retrieving head (log scale)")
    axes.set_ylabel("accuracy / accuracy of argmax" if relative else "share of questions answered")
    _legend(figure)
    return figure


def _look(data: EvaluationData, policy: str) -> dict[str, Any]:
    own = style_of(data, policy)
    dash = (0, tuple(part / 2 for part in own.dash)) if own.dash else "-"
    return {
        "color": COLOURS[own.colour],
        "marker": own.symbol,
        "linestyle": dash,
        "linewidth": 1.8,
        "markersize": 5.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def _lengths(axes: Axes, data: EvaluationData, trained_at: float) -> None:
    """The axis of lengths; the trained one is named at a height where there are no lines near it."""
    axes.set_xscale("log", base=2)
    every = -(-len(data.lengths) // 6)
    ticks = data.lengths[::-1][::every][::-1]
    axes.set_xticks(ticks, [str(length) for length in ticks])
    axes.set_xlabel("context length, tokens")
    trained = data.trained_length
    if trained is not None and data.lengths[0] <= trained <= data.lengths[-1]:
        axes.axvline(trained, color="#46505e", linewidth=1, linestyle=":")
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (4, 4), "textcoords": "offset points"}
        axes.annotate("trained length", (trained, trained_at), fontsize=9, color="#46505e", **place)


def _legend(figure: Figure) -> None:
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(6, len(handles)))
