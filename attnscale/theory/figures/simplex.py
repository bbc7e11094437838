"""Figures of the experiment on the simplex, each drawn from its table alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnscale.theory.drawing import COLOURS, DASHES, GREY, MARKERS, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


def draw_limits(rows: Rows) -> Figure:
    """Output cosine and Jacobian norm over γ for growing n: steps in the making."""
    figure, (left, right) = new_figure(columns=2, size=(4.9, 3.8))
    for index, n in enumerate(dict.fromkeys(row["n"] for row in rows)):
        part = [row for row in rows if row["n"] == n]
        for axes, column in ((left, "cosine"), (right, "jacobian")):
            axes.plot(
                [row["ratio"] for row in part], [row[column] for row in part],
                color=COLOURS[index], linestyle=DASHES[index], label=f"n = 10^{round(math.log10(n))}",
            )  # fmt: skip
    left.plot([0.5, 1, 1, 1.5], [1, 1, 0.5, 0.5], color=GREY, linewidth=1.2, zorder=0)
    right.plot([0.5, 1, 1, 1.5], [0, 0, 1, 1], color=GREY, linewidth=1.2, zorder=0)
    left.plot([1.0], [0.8], "o", color=GREY, markersize=6)
    right.plot([1.0], [0.25], "o", color=GREY, markersize=6)
    left.set(xlabel="γ(1−ρ)", ylabel="cosine after one layer, ρ = ½ before", title="Theorem 2.1; grey: the limit")
    right.set(xlabel="γ(1−ρ)", ylabel="η = ‖∇X'‖²/(nd), d = n", title="Theorem 2.4; grey: the limit")
    left.legend(frameon=False, loc="lower left")
    right.legend(frameon=False, loc="upper left")
    return figure


def draw_layers(layers: Rows, lifetime: Rows) -> Figure:
    """1 − ρ through layers, and how many layers a supercritical configuration lasts."""
    figure, (left, right) = new_figure(columns=2, size=(4.9, 3.8))
    keys = dict.fromkeys((row["ratio"], row["alpha"]) for row in layers)
    for index, (ratio, alpha) in enumerate(keys):
        part = [row for row in layers if (row["ratio"], row["alpha"]) == (ratio, alpha) and row["apart"] > 1e-9]
        label = f"γ/γ_c = {ratio:g}" + (f", residual α = {alpha:g}" if alpha else "")
        left.plot(
            [row["layer"] for row in part], [row["apart"] for row in part], color=COLOURS[index],
            linestyle=DASHES[index], marker=MARKERS[index], markersize=4, label=label,
        )  # fmt: skip
    left.set(yscale="log", ylim=(1e-8, 2), xlabel="layers", ylabel="1 − cosine between tokens")
    left.set_title(f"Simplex of n = {layers[0]['n']} tokens, same β in every layer")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    for index, ratio in enumerate(dict.fromkeys(row["ratio"] for row in lifetime)):
        part = [row for row in lifetime if row["ratio"] == ratio]
        lengths = [row["n"] for row in part]
        right.plot(lengths, [row["predicted"] for row in part], color=COLOURS[index], linestyle=DASHES[index])
        counted = [row["counted"] for row in part]
        right.plot(lengths, counted, MARKERS[index], color=COLOURS[index], label=f"γ/γ_c = {ratio:g}")
    right.set(xscale="log", yscale="log", xlabel="n", ylabel="layers until 1 − ρ has halved")
    right.set_title("Lines: n^(γ(1−ρ)−1)/(2ρ(1−ρ)β)")
    right.legend(frameon=False, loc="upper left")
    return figure
