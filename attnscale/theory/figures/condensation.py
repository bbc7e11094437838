"""Figures of condensation: the crossover of w_max, other order parameters against t, and retrieval of a signal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnscale.theory import condensation, poisson_dirichlet
from attnscale.theory.drawing import GREY, line_style, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


def crossover_figure(rows: Rows) -> Figure:
    """E ln w_max against n."""
    figure, (axes,) = new_figure(size=(6.4, 4.4))
    draw_crossover(axes, rows)
    return figure


def draw_crossover(axes: Axes, rows: Rows) -> None:
    """Typical w_max against n, a series per t: measured, exact at finite n, and the limit of the slope."""
    for place, t in enumerate(_values(rows, "t")):
        chosen = [row for row in rows if row["t"] == t]
        n = [row["n"] for row in chosen]
        style = line_style(place)
        axes.plot(n, [math.exp(row["mean_ln_w_max_predicted"]) for row in chosen], color=style["color"], linewidth=1.3)
        measured = [math.exp(row["mean_ln_w_max"]) for row in chosen]
        axes.plot(n, measured, style["marker"], color=style["color"], markersize=5.5)
        shift = {2.0: 0, 1.5: -7}.get(t, -3)  # these two would touch
        axes.annotate(f"t = {t:g}", (n[-1], measured[-1]), xytext=(7, shift), textcoords="offset points", fontsize=8.5)
        if t < 1:
            start = math.exp(chosen[0]["mean_ln_w_max_predicted"])
            power = [start * (x / n[0]) ** condensation.w_max_exponent(t) for x in n]
            axes.plot(n, power, color=style["color"], linewidth=1, linestyle=(0, (1, 2)))
    axes.set(xscale="log", yscale="log", xlabel="keys n", ylabel="largest weight, exp E ln w_max")
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=2.0 ** (math.log2(max(row["n"] for row in rows)) + 1.6))
    axes.set_title("Condensation at β = t·√(2 ln n)/σ", loc="left", fontsize=10)
    for label, look in (("measured", "ok"), ("exact at n", "-k"), ("slope −(1−t)²", ":k")):
        axes.plot([], [], look, markersize=5, linewidth=1.2, label=label)
    axes.legend(loc="lower left", frameon=False, fontsize=8.5)


def order_figure(rows: Rows) -> Figure:
    """E w_max, E Σ w² and the spread of ln Z against t, with their limits."""
    figure, panels = new_figure(columns=3, size=(4.2, 3.7))
    limit_t = [1.02 + 0.02 * step for step in range(50)]
    texts = {
        "mean_w_max": ("E w_max", [poisson_dirichlet.mean_largest(t) for t in limit_t]),
        "sum_of_squares": ("E Σ w²", [condensation.participation_limit(t) for t in limit_t]),
        "spread": ("standard deviation of ln Z, nats", [condensation.log_partition_spread_limit(t) for t in limit_t]),
    }
    lengths = _values(rows, "n")
    for axes, (name, (label, limit)) in zip(panels, texts.items(), strict=True):
        for place, n in enumerate((lengths[0], lengths[len(lengths) // 2], lengths[-1])):
            chosen = [row for row in rows if row["n"] == n]
            t, style = [row["t"] for row in chosen], line_style(place + 1)
            axes.plot(t, [row[f"{name}_predicted"] for row in chosen], color=style["color"], linewidth=1)
            errors = [2 * row[f"{name}_error"] for row in chosen]
            look = {"fmt": style["marker"], "color": style["color"], "markersize": 5}
            axes.errorbar(t, [row[name] for row in chosen], errors, label=f"n = {n}", **look)
        axes.plot([0, 1, *limit_t], [0, 0, *limit], color="black", linestyle=(0, (5, 2)), label="n → ∞")
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        axes.set(xlabel="t = β/β_c", ylabel=label)
        axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    end = 1.1 / condensation.critical_beta(lengths[-1])
    panels[2].plot([0, end], [0, 1.1], color=GREY, linewidth=1)
    panels[2].annotate(f"bound βσ, n = {lengths[-1]}", (end, 1.1), xytext=(4, -4), **_small())
    panels[0].set_title("markers: measured ± 2 standard errors; thin lines: exact", loc="left", fontsize=10)
    return figure


def retrieval_figure(retrieval: Rows, unscaled: Rows) -> Figure:
    """The weight of a signal key against its score, its chance to win, and w_max with and without d^(−1/2)."""
    figure, (weight, wins, dimension) = new_figure(columns=3, size=(4.2, 3.7))
    for place, t in enumerate(_values(retrieval, "t")):
        chosen = [row for row in retrieval if row["t"] == t]
        share, style = [row["share"] for row in chosen], line_style(place + 1)
        threshold = chosen[0]["threshold"] / condensation.critical_beta(chosen[0]["n"])
        weight.plot(share, [row["weight_predicted"] for row in chosen], color=style["color"], linewidth=1.2)
        measured = [row["weight"] for row in chosen]
        weight.plot(share, measured, style["marker"], color=style["color"], markersize=5, label=f"t = {t:g}")
        weight.plot([threshold], [1.06], marker=style["marker"], color="white", markeredgecolor=style["color"])
    weight.set(ylabel="E weight of the signal key", ylim=(-0.03, 1.12), xlabel="score of the signal, m/(σ√(2 ln n))")
    weight.legend(loc="center left", frameon=False, fontsize=8.5)
    weight.set_title("open markers: threshold of each t", loc="left", fontsize=10)
    share = [row["share"] for row in chosen]
    wins.plot(share, [row["wins_predicted"] for row in chosen], color="black", linewidth=1.2, label="Φ(m/σ)ⁿ⁻¹")
    wins.plot(share, [row["wins"] for row in chosen], "ok", markersize=5, label="measured")
    wins.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    wins.annotate("m = σ√(2 ln n)", (1, 0.3), xytext=(5, 0), **_small())
    wins.set(ylabel="P(signal has the largest score)", xlabel="score of the signal, m/(σ√(2 ln n))")
    wins.legend(loc="upper left", frameon=False, fontsize=8.5)
    wins.set_title(f"n = {chosen[0]['n']}", loc="left", fontsize=10)
    for place, scaled in enumerate((True, False)):
        some = [row for row in unscaled if row["scaled"] == scaled]
        style, d = line_style(place + 1), [row["d"] for row in some]
        dimension.plot(d, [row["mean_w_max_predicted"] for row in some], color=style["color"], linewidth=1.2)
        measured, errors = [row["mean_w_max"] for row in some], [2 * row["mean_w_max_error"] for row in some]
        label = "q·k/√d" if scaled else "q·k"
        dimension.errorbar(d, measured, errors, fmt=style["marker"], color=style["color"], markersize=5, label=label)
    critical = unscaled[0]["critical_d"]
    dimension.axvline(critical, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    dimension.annotate("d = 2 ln n", (critical, 0.9), xytext=(5, 0), **_small())
    dimension.set(xlabel="head dimension d", ylabel="E w_max at β = 1", ylim=(-0.03, 1.03))
    dimension.set_xscale("log", base=2)
    dimension.legend(loc="center right", frameon=False, fontsize=8.5)
    dimension.set_title(f"n = {unscaled[0]['n']}, |q|² = d", loc="left", fontsize=10)
    return figure


def _values(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _small() -> dict[str, Any]:
    return {"textcoords": "offset points", "fontsize": 8.5, "color": GREY}
