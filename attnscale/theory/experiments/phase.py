"""Gaussian tokens: phases over (ρ, γ), the bounds of Theorems 2.3 and 2.5, the middle phase, and Gaussian spacings.

Covers Figures 1 and 2, the theorems and Appendices C and D of "Critical Attention Scaling in Long-Context Transformers"
(arXiv:2510.05554).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnscale.attention import attention_with_stats
from attnscale.statistics import StatsRequest, row_statistics
from attnscale.theory import bounds, condensation, families, gap_counting, phase, simplex
from attnscale.theory.estimates import mean
from attnscale.theory.experiments import (
    DASHES,
    REFERENCE,
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Assumption 3 with groups of n^τ tokens: far cosine, near cosine, τ.
FAR, NEAR, TAU = 0.1, 0.8, 0.5
LABELS = {
    "angle_ratio": "λ: angle after / before one layer (Eq. 26)",
    "jacobian_norm": "η: ‖∇X'‖²/(nd) (Eq. 27)",
}


class Sizes(NamedTuple):
    """Tokens, cells per axis, draws and dimensions of the sweep; tokens per group; scores and rows of the spacings."""

    n: int
    cells: int
    draws: int
    dims: tuple[int, ...]
    group: int
    scores: int
    rows: int


QUICK = Sizes(128, 12, 1, (8, 32, 256), 16, 2**12, 400)
FULL = Sizes(512, 18, 2, (16, 64, 512), 32, 2**16, 800)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Sweep (ρ, γ) for three dimensions, check every bound, and measure the middle phase and Gaussian spacings."""
    sizes = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(4)
    lines: list[Comparison] = []
    steps = [(f"sweep over (ρ, γ), d = {d}", "sweep", partial(_sweep, sizes, d, generator, lines)) for d in sizes.dims]
    steps.append(("bounds of Theorems 2.3 and 2.5", "bounds", partial(_bounds, sizes, generator, lines)))
    steps.append(("middle phase", "middle_phase", partial(_middle_phase, sizes, lines)))
    steps.append(("Gaussian spacings", "spacings", partial(_spacings, sizes, generator, lines)))
    data = collect(steps, progress)
    figures = {
        name: Picture(partial(draw_sweep, column=name), {"sweep": data["sweep"].only("n", "d", "rho", "gamma", name)})
        for name in LABELS
    }
    for name, draw in (("bounds", draw_bounds), ("middle_phase", draw_middle_phase), ("spacings", draw_spacings)):
        figures[name] = Picture(draw, {name: data[name]})
    largest = data["sweep"].where(d=sizes.dims[-1])
    return Experiment("phase", lines, data, figures, (Picture(draw_strip_panel, {"sweep": largest}),))


def _sweep(sizes: Sizes, d: int, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    n, cells = sizes.n, sizes.cells
    rhos = [0.9 * (step + 0.5) / cells for step in range(cells)]
    gammas = [5.0 * (step + 0.5) / cells for step in range(cells)]
    points = list(phase.sweep(n, d, rhos, gammas, generator, draws=sizes.draws))
    x, beta = phase.gaussian_tokens(n, d, 0.5, generator), 3.0 * math.log(n)
    eta, error = phase.jacobian_norm(x, beta, 16, generator)
    where = f"d={d} n={n} ρ=0.5 γ=3"
    closed = phase.closed_jacobian_norm(x, beta)
    lines.append(Comparison("η, Hutchinson's estimate", where, closed, eta, error))
    if d >= n:  # for d < n the cosines scatter too much to compare the transition with that of a simplex
        draws = [x, *(phase.gaussian_tokens(n, d, 0.5, torch.Generator().manual_seed(seed)) for seed in range(7))]
        ratios = torch.tensor([phase.angle_ratio(tokens, beta) for tokens in draws], device="cpu")
        predicted = simplex.angle_ratio(n, 0.5, beta)
        lines.append(Comparison("λ, against the simplex", where, predicted, *mean(ratios), "limit"))
    # The tokens of one draw share z₀, and with it their length; each draw here has its own z₀.
    draws = [phase.gaussian_tokens(1, d, 0.5, generator) for _ in range(2000)]
    inverse = torch.cat(draws).square().sum(-1).reciprocal() * (1.0 - 1.0 / d)
    predicted = (1.0 - 1.0 / d) * d / (d - 2.0)  # E 1/‖x‖² = d/(d−2) for N(0, I/d)
    lines.append(Comparison("η for γ → ∞, mean over draws", f"d={d}", predicted, *mean(inverse)))
    return Rows({"n": n, "d": d, **point._asdict()} for point in points)


def _bounds(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """Least cosine, distance from the identity and η over γ with their bounds; d is large enough for Assumption 2."""
    n, d, rho, alpha = sizes.n, 4 * sizes.n, 0.5, 0.5
    x = phase.gaussian_tokens(n, d, rho, generator)
    x = x * (0.8 + 0.4 * torch.rand(n, 1, generator=generator, dtype=x.dtype, device=generator.device))
    given, y = bounds.token_range(x), phase.directions(x)
    off = ~torch.eye(n, dtype=torch.bool, device=x.device)
    found = Rows()
    for step in range(1, 25):
        gamma = step * 0.25
        beta = gamma * math.log(n)
        after, residual = (phase.directions(phase.layer(x, beta, weight)) for weight in (0.0, alpha))
        moved = (phase.layer(y, beta) - y).norm(dim=-1).max()
        found.append(
            {"n": n, "d": d, "gamma": gamma, "alpha": alpha}
            | {"below": 1.0 / (1.0 - given.rho_min), "above": 1.0 / (1.0 - given.rho_max), "rho_min": given.rho_min}
            | {"cosine": float((after @ after.T)[off].min()), "cosine_bound": bounds.contraction_bound(given, beta)}
            | {"residual_cosine": float((residual @ residual.T)[off].min())}
            | {"residual_cosine_bound": bounds.contraction_bound(given, beta, alpha)}
            | {"moved": float(moved), "moved_bound": bounds.identity_bound(given, beta)}
            | {"eta": phase.closed_jacobian_norm(x, beta), "eta_upper": bounds.jacobian_upper_bound(given, beta)}
            | {"eta_lower": bounds.jacobian_lower_bound(given, beta)}
        )
    checks = {
        "lower bound/min ⟨y'_i, y'_j⟩": ("cosine_bound", "cosine"),
        "the same with residual": ("residual_cosine_bound", "residual_cosine"),
        "max ‖ATT(y_i) − y_i‖/upper bound": ("moved", "moved_bound"),
        "η/upper bound": ("eta", "eta_upper"),
        "lower bound/η": ("eta_lower", "eta"),
    }
    where = f"n={n} d={d}, largest of {len(found)} values of γ"
    for name, (less, more) in checks.items():
        lines.append(Comparison(name, where, 1.0, max(row[less] / row[more] for row in found), kind="bound"))
    return found


def _middle_phase(sizes: Sizes, lines: list[Comparison]) -> Rows:
    """Weight of a row on its own token, on near and on far tokens, for groups of √n tokens, through attention."""
    n, size = sizes.group**2, sizes.group
    y = phase.grouped_tokens(n, size, FAR, NEAR)
    members = torch.eye(n // size, dtype=y.dtype, device=y.device).repeat_interleave(size, 0)  # a token's group
    edges = phase.phase_edges(TAU, (FAR, FAR), (NEAR, NEAR))
    found = Rows()
    for step in range(1, 25):
        gamma = step * 0.2
        beta = gamma * math.log(n)
        request = StatsRequest(entropy=False, lse=False, max_logit=False)
        shares, stats = attention_with_stats(y[None], y[None], members[None], scale=beta, request=request)
        own = float(stats.w_max.flatten()[0])
        group = float(shares[0, 0, 0])
        exact = phase.row_mass(n, size - 1, FAR, NEAR, beta)
        found.append(
            {"n": n, "gamma": gamma, "own": own, "near": group - own, "far": 1.0 - group}
            | {f"{name}_exact": value for name, value in exact._asdict().items()}
            | edges._asdict()
        )
        if step in (2, 10, 24):
            where = f"n={n} γ={gamma:g} τ={TAU:g}"
            lines.append(Comparison("share of near tokens", where, exact.near, group - own))
    at = 0.5 * (edges.near_above + edges.near_below)
    mass = phase.row_mass(10**12, 10**6 - 1, FAR, NEAR, at * math.log(10**12))
    lines.append(Comparison("share of near tokens", f"n=10¹² γ={at:.3g}", 1.0, mass.near, kind="limit"))
    return found


def _spacings(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """Gaps of the largest Gaussian scores, and the largest weight: as printed, in the limit, and measured."""
    n, rows, draws = sizes.scores, sizes.rows, 25 * sizes.rows
    scores = families.sample("gaussian", n, rows, generator)
    top = scores.topk(17, dim=-1).values
    found = Rows()
    scale = gap_counting.gaussian_quantile(n)
    for k in (2, 3, 5, 9, 17):
        gap = scale * (top[:, 0] - top[:, k - 1])
        exact = scale * gap_counting.mean_gap(n, k)
        found.append(
            {"kind": "gap", "n": n, "x": k, "printed": k - 1.0, "limit": gap_counting.mean_gap_limit(k), "exact": exact}
            | mean(gap).columns()
        )
        if k in (2, 9):
            lines.append(Comparison("t_n·E(a₁ − a_k)", f"n={n} k={k}", exact, *mean(gap)))
    for t in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        weights = row_statistics(scores, t * math.sqrt(2.0 * math.log(n))).w_max
        found.append(
            {"kind": "weight", "n": n, "x": t}
            | mean(weights).columns()
            | {"printed": float(gap_counting.printed_top_weight(t, draws, generator).mean())}
            | {"limit": condensation.w_max_limit(t) if t > 1.0 else 0.0}
        )
    return found


def draw_sweep(rows: Rows, column: str) -> Figure:
    """One panel per dimension over (ρ, γ), with the curve γ = 1/(1−ρ): Figures 1 and 2 of the paper."""
    figure, panels = new_figure(columns=len(rows.distinct("d")), size=(3.6, 3.5))
    for place, d, part in rows.series("d"):
        mesh = _heat_map(panels[place], part, column)
        panels[place].set_title(f"d = {d}, n = {rows[0]['n']}")
        if place:
            panels[place].set_ylabel("")
    panels[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    figure.colorbar(mesh, ax=panels, label=LABELS[column], extend="max" if column == "jacobian_norm" else "neither")
    return figure


def draw_strip_panel(axes: Axes, rows: Rows) -> None:
    """The phase diagram of one dimension, for the strip."""
    mesh = _heat_map(axes, rows, "angle_ratio")
    axes.set_title(f"Angle kept by one layer, d = {rows[0]['d']}", loc="left", fontsize=10)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9)
    axes.figure.colorbar(mesh, ax=axes, label="λ: angle after / before")


def draw_bounds(rows: Rows) -> Figure:
    """Measured values with the bounds of Theorems 2.3 and 2.5."""
    figure, panels = new_figure(columns=3, size=(4.3, 3.8))
    curves: tuple[tuple[int, str, str, int], ...] = (
        (0, "cosine", "measured, α = 0", 0),
        (0, "cosine_bound", "lower bound, α = 0", 1),
        (0, "residual_cosine", f"measured, α = {rows[0]['alpha']:g}", 2),
        (0, "residual_cosine_bound", f"lower bound, α = {rows[0]['alpha']:g}", 3),
        (1, "moved", "measured", 0),
        (1, "moved_bound", "upper bound", 1),
        (2, "eta", "measured", 0),
        (2, "eta_upper", "upper bound", 1),
        (2, "eta_lower", "lower bound", 3),
    )
    for panel, column, label, place in curves:
        points = [(row["gamma"], row[column]) for row in rows if row[column] > 0.0]
        panels[panel].plot(*zip(*points, strict=True), label=label, markersize=3.5, **line_style(place))
    for axes in panels:
        for edge in ("below", "above"):
            axes.axvline(rows[0][edge], **REFERENCE)
        axes.set_xlabel("γ = β/ln n; dotted: 1/(1−ρ₁) and 1/(1−ρ₂)")
    panels[0].set(ylabel="smallest cosine after one layer", title="Contraction, Eq. 10", ylim=(0, 1.05))
    panels[1].set(ylabel="largest ‖ATT(y_i) − y_i‖", title="Identity, Eq. 11", yscale="log")
    panels[2].set(ylabel="η", title="Jacobian norm, Eqs. 22 and 23", yscale="log")
    panels[0].legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.95))
    panels[1].legend(frameon=False, fontsize=8, loc="lower left")
    panels[2].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def draw_middle_phase(rows: Rows) -> Figure:
    """Shares of a row's weight over γ: far tokens, near tokens, the token itself."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    names = {"far": "far tokens", "near": "near tokens", "own": "the token itself"}
    for place, (name, label) in enumerate(names.items()):
        rows.line(axes, "gamma", f"{name}_exact", place)
        rows.points(axes, "gamma", name, place, label=label)
    for edge in ("near_above", "near_below"):
        axes.axvline(rows[0][edge], **REFERENCE)
    axes.set(xlabel="γ = β/ln n; dotted: the edges of Lemma C.1", ylabel="share of the row's weight")
    axes.set_title(f"Groups of √n near tokens, n = {rows[0]['n']}; lines: closed form")
    axes.legend(frameon=False, loc="center right")
    return figure


def draw_spacings(rows: Rows) -> Figure:
    """Gaps and largest weight of Gaussian scores, as printed in Appendix D and as measured."""
    figure, panels = new_figure(columns=2, size=(4.9, 3.8))
    for axes, kind in zip(panels, ("gap", "weight"), strict=True):
        part = rows.where(kind=kind)
        part.line(axes, "x", "printed", 2, linestyle=DASHES[1], label="as printed")
        part.line(axes, "x", "limit", 1, linestyle="solid", label="limit, gaps E_k/k")
        part.error_bars(axes, "x", 0, label=f"measured, n = {part[0]['n']}")
    panels[0].set(xlabel="rank k", ylabel="t_n·E(a₁ − a_k)", title="Gaps of the largest scores, Eq. 117")
    panels[1].set(xlabel="t = β/√(2 ln n)", ylabel="E w_max", title="Largest weight, Eq. 118", ylim=(0, 1))
    panels[0].legend(frameon=False, loc="upper left")
    return figure


def _heat_map(axes: Axes, rows: Rows, column: str) -> Any:
    rhos, gammas = (sorted({row[name] for row in rows}) for name in ("rho", "gamma"))
    values = {(row["rho"], row["gamma"]): row[column] for row in rows}
    table = [[values[rho, gamma] for rho in rhos] for gamma in gammas]
    axes.grid(visible=False)
    mesh = axes.pcolormesh(rhos, gammas, table, cmap="cividis", vmin=0.0, vmax=1.0, shading="nearest")
    curve = [step / 100 for step in range(91)]
    critical = [1.0 / (1.0 - rho) for rho in curve]
    axes.plot(curve, critical, color="white", linewidth=3.0)
    axes.plot(curve, critical, color="black", linewidth=1.5, linestyle=DASHES[1], label="γ = 1/(1−ρ)")
    axes.set(xlabel="ρ", ylabel="γ = β/ln n", xlim=(min(rhos), max(rhos)), ylim=(min(gammas), max(gammas)))
    return mesh
