"""Figures of gap counting: Λ on its laws, the transition at β = Λ, and rows against the bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from attnscale.theory import gaps
from attnscale.theory.drawing import GREY, line_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Corner = Literal["upper left", "upper right"]


def laws_figure(rows: Rows) -> Figure:
    """Λ against n with the law of each family, and measured over predicted."""
    figure, (curves, ratios) = new_figure(columns=2, size=(5.6, 4.4))
    draw_laws(curves, rows)
    for place, family in enumerate(_values(rows, "family")):
        chosen = [row for row in rows if row["family"] == family]
        style = line_style(place)
        shares = [row["median"] / row["predicted"] for row in chosen]
        errors = [2 * row["median_error"] / row["predicted"] for row in chosen]
        look = {"color": style["color"], "marker": style["marker"], "linestyle": style["linestyle"]}
        ratios.errorbar([row["n"] for row in chosen], shares, errors, markersize=5, linewidth=1.1, **look)
    ratios.axhline(1, color="black", linewidth=1)
    ratios.set_xscale("log", base=2)
    ratios.set(xlabel="keys n", ylabel="median Λ, measured/predicted")
    ratios.set_title("± 2 standard errors; Gaussian rows converge slowly", loc="left", fontsize=10)
    return figure


def draw_laws(axes: Axes, rows: Rows) -> None:
    """Median Λ of each family against n: markers measured, lines predicted."""
    for place, family in enumerate(_values(rows, "family")):
        chosen = [row for row in rows if row["family"] == family]
        style, n = line_style(place), [row["n"] for row in chosen]
        look = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.2}
        axes.plot(n, [row["predicted"] for row in chosen], **look)
        axes.plot(n, [row["median"] for row in chosen], style["marker"], color=style["color"], markersize=5)
        axes.plot([], [], marker=style["marker"], markersize=5, label=family, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=200 * max(row["median"] for row in rows))  # room for the legend
    axes.set(xlabel="keys n", ylabel="accumulation scale Λ, 1/score")
    axes.set_title("Λ: median measured (markers), its law (lines)", loc="left", fontsize=10)
    axes.legend(loc="upper left", frameon=False, fontsize=7.5, ncols=2, handlelength=3)


def transition_figure(rows: Rows) -> Figure:
    """Entropy against β, and entropy and w_(1) − w_(2) against β/Λ, for the shortest and the longest rows."""
    figure, (raw, entropy, separation) = new_figure(columns=3, size=(4.4, 4.1))
    draw_transition(raw, rows, over="beta", legend=None)
    draw_transition(entropy, rows, legend="upper right")
    draw_transition(separation, rows, quantity="separation", legend=None)
    raw.set_title("over β: each family for itself", loc="left", fontsize=10)
    limit = [2 ** (-5 + step / 8) for step in range(40)]
    bounds = [(r, gaps.separation_bound(r)) for r in limit if r < 1]
    shown = [(r, bound) for r, bound in bounds if bound <= 1]
    separation.plot(*zip(*shown, strict=True), color=GREY, linewidth=1.2)
    separation.annotate(
        "bound r/(e(1−r))", shown[-9], xytext=(-92, 2), textcoords="offset points", fontsize=8, color=GREY
    )
    return figure


def draw_transition(
    axes: Axes, rows: Rows, quantity: str = "entropy_share", over: str = "r", legend: Corner | None = "upper left"
) -> None:
    """A statistic of the weights against β/Λ or β: thin for the shortest rows, with markers for the longest."""
    lengths = _values(rows, "n")
    for place, family in enumerate(_values(rows, "family")):
        style = line_style(place)
        for n in (lengths[0], lengths[-1]):
            chosen = [row for row in rows if row["family"] == family and row["n"] == n]
            x, y = [row[over] for row in chosen], [row[quantity] for row in chosen]
            if n == lengths[-1]:
                look = {"marker": style["marker"], "markersize": 4, "linewidth": 1.3, "markevery": (place % 3, 3)}
                axes.plot(x, y, color=style["color"], linestyle=style["linestyle"], label=family, **look)
            else:
                axes.plot(x, y, color=style["color"], linewidth=0.6, alpha=0.7)
    axes.set_xscale("log", base=10 if over == "beta" else 2)
    if over == "r":
        axes.axvline(1, color="black", linewidth=1, linestyle=(0, (4, 3)))
    labels = {"entropy_share": "entropy/ln n", "separation": "w₁ − w₂"}
    axes.set(
        xlabel="β/Λ" if over == "r" else "β, 1/score", ylabel=f"{labels[quantity]}, median of rows", ylim=(-0.03, 1.03)
    )
    title = f"bold n = 2^{round(math.log2(lengths[-1]))}, thin n = 2^{round(math.log2(lengths[0]))}"
    axes.set_title(f"over β/Λ: {title}" if over == "r" else title, loc="left", fontsize=10)
    if legend is not None:
        axes.legend(loc=legend, frameon=False, fontsize=7, handlelength=3)


def bounds_figure(rows: Rows) -> Figure:
    """Rows against what β/Λ guarantees: w_max above, w_max below, and entropy above."""
    figure, (above, below, entropy) = new_figure(columns=3, size=(4.2, 3.8))
    for place, family in enumerate(_values(rows, "family")):
        style = line_style(place)
        look = {
            "marker": style["marker"],
            "color": style["color"],
            "linestyle": "none",
            "markersize": 3.5,
            "alpha": 0.5,
        }
        high = [row for row in rows if row["family"] == family and row["r"] > 1]
        low = [row for row in rows if row["family"] == family and row["r"] < 1]
        above.plot([row["r"] for row in high], [row["w_max"] for row in high], label=family, **look)
        below.plot([row["rank"] ** (row["r"] - 1) for row in low], [row["w_max"] for row in low], **look)
        entropy.plot([row["r"] for row in high], [max(row["entropy"], 1e-6) for row in high], **look)
    r = [2 ** (0.05 + step / 20) for step in range(80)]
    above.plot(r, [gaps.certificate(x) for x in r], color="black", linewidth=1.6)
    above.set(xlabel="β/Λ", ylabel="w_max", ylim=(0, 1.03))
    above.set_title("w_max ≥ 1/ζ(β/Λ), the line", loc="left", fontsize=10)
    ends = [1e-6, 1]
    below.plot(ends, ends, color="black", linewidth=1.6)
    below.set(xscale="log", yscale="log", xlabel="k*^−(1−β/Λ)", ylabel="w_max")
    below.set_title("β < Λ: w_max is at most the line", loc="left", fontsize=10)
    entropy.plot(r, [gaps.entropy_bound(x) for x in r], color="black", linewidth=1.6)
    entropy.set(yscale="log", xlabel="β/Λ", ylabel="entropy, nats", ylim=(5e-7, 1e3))
    entropy.set_title("β > Λ: entropy is at most the line", loc="left", fontsize=10)
    for axes in (above, entropy):
        axes.set_xscale("log", base=2)
    above.legend(loc="lower right", frameon=False, fontsize=7, ncols=2)
    return figure


def _values(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
