"""Tokens on a simplex: closed forms against attention, their limits, and many layers.

The setting is Assumption 1 of "Critical Attention Scaling in Long-Context Transformers" (arXiv:2510.05554).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnscale.statistics import StatsRequest
from attnscale.statistics.gaps import accumulation_scale
from attnscale.theory import phase, simplex
from attnscale.theory.experiments import (
    GREY,
    Comparison,
    Experiment,
    Picture,
    Progress,
    Rows,
    collect,
    line_style,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = ((0.3, 1.0, 1.0, 0.0), (0.5, 2.0, 2.0, 0.5), (0.6, 0.5, 4.0, 1.5))  # ρ, q, γ, α
RHO = 0.5
LENGTHS = (10**3, 10**6, 10**9, 10**12)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Compare the closed forms with this package's attention, with their limits, and iterate them over layers."""
    lines: list[Comparison] = []
    steps = (
        ("closed forms against attention", "closed_forms", partial(_closed_forms, quick, lines)),
        ("finite n against the limit", "limits", partial(_limits, lines)),
        ("many layers", "layers", partial(_layers, quick, lines)),
        ("layers until collapse", "lifetime", partial(_lifetime, quick, lines)),
    )
    data = collect(steps, progress)
    figures = {
        "limits": Picture(draw_limits, {"limits": data["limits"]}),
        "layers": Picture(draw_layers, {"layers": data["layers"], "lifetime": data["lifetime"]}),
    }
    return Experiment("simplex", lines, data, figures)


def _closed_forms(quick: bool, lines: list[Comparison]) -> Rows:
    n, small = (128, 16) if quick else (512, 32)
    found = []
    for rho, q, gamma, alpha in CASES:
        x, beta = phase.simplex_tokens(n, n, rho, q), gamma * math.log(n)
        after = phase.layer(x, beta, alpha)
        cosine, norm = float(phase.directions(after)[:2].prod(0).sum()), float(after[0].square().sum())
        stats = phase.layer_statistics(x, beta, StatsRequest(lse=False, max_logit=False))
        y = phase.directions(x)
        scale = float(accumulation_scale(y @ y.T).median())
        few, low = phase.simplex_tokens(small, small + 3, rho, q), gamma * math.log(small)
        exact = phase.exact_jacobian_norm(few, low)
        eta, error = phase.jacobian_norm(x, beta, 16, torch.Generator().manual_seed(0))
        case = f"ρ={rho:g} q={q:g} γ={gamma:g}"
        where, whole = f"{case} n={n}", f"{case} α={alpha:g} n={n}"
        found += [
            Comparison("⟨y'_i, y'_j⟩", whole, simplex.output_cosine(n, rho, beta, q, alpha), cosine),
            Comparison("‖x'_i‖²", whole, simplex.output_norm(n, rho, beta, q, alpha), norm),
            Comparison("w_max = A_ii", where, simplex.weights(n, rho, beta).own, float(stats.w_max.mean())),
            Comparison("entropy", where, simplex.entropy(n, rho, beta), float(stats.entropy.mean())),
            Comparison("Λ = ln n/(1−ρ)", where, simplex.critical_beta(n, rho), scale),
            Comparison(
                "η, torch.func", f"{case} n={small}", simplex.jacobian_norm(small, small + 3, rho, low, q), exact
            ),
            Comparison("η, Hutchinson", where, simplex.jacobian_norm(n, n, rho, beta, q), eta, error),
        ]
    lines += found
    return Rows(line._asdict() for line in found)


def _limits(lines: list[Comparison]) -> Rows:
    """Output cosine and Jacobian norm over γ at growing n, and their distance from the limit of each phase."""
    critical = 1.0 / (1.0 - RHO)
    found = Rows()
    for n in LENGTHS:
        for ratio in (0.5 + step / 80 for step in range(81)):
            beta = ratio * critical * math.log(n)
            cosine, jacobian = simplex.output_cosine(n, RHO, beta), simplex.jacobian_norm(n, n, RHO, beta)
            limits = (
                simplex.output_cosine_limit(ratio * critical, RHO),
                simplex.jacobian_norm_limit(ratio * critical, RHO),
            )
            row = {"n": n, "ratio": ratio, "cosine": cosine, "jacobian": jacobian}
            found.append(row | dict(zip(("cosine_limit", "jacobian_limit"), limits, strict=True)))
    for ratio in (0.75, 1.0, 1.25):
        gamma, n = ratio * critical, LENGTHS[-1]
        beta, where = gamma * math.log(n), f"ρ={RHO:g} γ/γ_c={ratio:g} n=d=10¹²"
        limit, value = simplex.output_cosine_limit(gamma, RHO), simplex.output_cosine(n, RHO, beta)
        lines.append(Comparison("limit of ⟨y'_i, y'_j⟩", where, limit, value, kind="limit"))
        limit, value = simplex.jacobian_norm_limit(gamma, RHO, n), simplex.jacobian_norm(n, n, RHO, beta)
        lines.append(Comparison("limit of η", where, limit, value, kind="limit"))
    return found


def _layers(quick: bool, lines: list[Comparison]) -> Rows:
    """1 − ρ over layers in closed form for n = 1000, and the measured end-to-end Jacobian of three layers."""
    n, most = 1000, 30
    found = Rows()
    for ratio, alpha in ((0.8, 0.0), (1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (0.8, 1.0)):
        beta = ratio * simplex.critical_beta(n, RHO)
        for layer, state in enumerate(simplex.trajectory(n, RHO, beta, most, alpha=alpha)):
            found.append({"n": n, "ratio": ratio, "alpha": alpha, "layer": layer, "apart": state.apart, "q": state.q})
    tokens_used = 64 if quick else 256
    x = phase.simplex_tokens(tokens_used, tokens_used, RHO)
    for ratio in (0.8, 2.5):
        beta = ratio * simplex.critical_beta(tokens_used, RHO)
        apart = simplex.trajectory(tokens_used, RHO, beta, 3)[-1].apart
        after = phase.directions(phase.layers(x, beta, 3))
        measured = 0.5 * float((after[0] - after[1]).square().sum())
        where = f"γ/γ_c={ratio:g} n={tokens_used}"
        lines.append(Comparison("1 − ρ after 3 layers", where, apart, measured))
        predicted = simplex.jacobian_norm_limit(ratio / (1 - RHO), RHO, tokens_used)
        eta, error = phase.jacobian_norm(x, beta, 8, torch.Generator().manual_seed(0), depth=3)
        lines.append(Comparison("η of 3 layers", where, predicted, eta, error, "limit"))
    return found


def _lifetime(quick: bool, lines: list[Comparison]) -> Rows:
    found = Rows()
    for ratio in (1.5, 1.75):
        for power in range(2, 9):
            n = 10**power
            beta = ratio * simplex.critical_beta(n, RHO)
            predicted = simplex.lifetime(n, RHO, beta)
            if 3.0 < predicted < (3e3 if quick else 3e4):
                counted = simplex.layers_until_collapse(n, RHO, beta, most=10**5)
                found.append({"n": n, "ratio": ratio, "predicted": predicted, "counted": counted})
    last = max(found, key=lambda row: float(row["predicted"]))
    where = f"γ/γ_c={last['ratio']:g} n={last['n']:.0e}"
    values = (last["predicted"], float(last["counted"]))
    lines.append(Comparison("layers until 1 − ρ has halved", where, *values, kind="limit"))
    return found


def draw_limits(rows: Rows) -> Figure:
    """Output cosine and Jacobian norm over γ for growing n, with their limits."""
    figure, (left, right) = new_figure(columns=2, size=(4.9, 3.8))
    for place, n, part in rows.series("n"):
        for axes, column in ((left, "cosine"), (right, "jacobian")):
            part.line(axes, "ratio", column, place, label=f"n = 10^{round(math.log10(n))}")
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
    """1 − ρ over layers, and the number of layers until a supercritical configuration collapses."""
    figure, (left, right) = new_figure(columns=2, size=(4.9, 3.8))
    keys = dict.fromkeys((row["ratio"], row["alpha"]) for row in layers)
    for place, (ratio, alpha) in enumerate(keys):
        part = Rows(row for row in layers.where(ratio=ratio, alpha=alpha) if row["apart"] > 1e-9)
        label = f"γ/γ_c = {ratio:g}" + (f", residual α = {alpha:g}" if alpha else "")
        part.line(left, "layer", "apart", place, label=label, markersize=4, marker=line_style(place)["marker"])
    left.set(yscale="log", ylim=(1e-8, 2), xlabel="layers", ylabel="1 − cosine between tokens")
    left.set_title(f"Simplex of n = {layers[0]['n']} tokens, same β in every layer")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    for place, ratio, part in lifetime.series("ratio"):
        part.line(right, "n", "predicted", place)
        part.points(right, "n", "counted", place, markersize=6, label=f"γ/γ_c = {ratio:g}")
    right.set(xscale="log", yscale="log", xlabel="n", ylabel="layers until 1 − ρ has halved")
    right.set_title("Lines: n^(γ(1−ρ)−1)/(2ρ(1−ρ)β)")
    right.legend(frameon=False, loc="upper left")
    return figure
