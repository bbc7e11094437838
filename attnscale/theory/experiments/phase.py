"""Gaussian tokens (seed 004, figures 1 and 2), the bounds of theorems 2.3 and 2.5, and appendices C and D."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from attnscale.attention import attention_with_stats
from attnscale.statistics import StatsRequest, row_statistics
from attnscale.theory import (
    bounds,
    families,
    jacobian,
    middle_phase,
    phase,
    poisson_dirichlet,
    simplex,
    spacings,
    tokens,
)
from attnscale.theory.estimates import mean
from attnscale.theory.experiment import Comparison, Experiment, Progress
from attnscale.theory.figures import phase as figures

# Assumption 3 with groups of n^τ tokens: far cosine, near cosine, τ.
FAR, NEAR, TAU = 0.1, 0.8, 0.5


class Sizes(NamedTuple):
    """Tokens, cells along each axis and draws of the sweep, its dimensions, tokens in a group, and Gaussian rows."""

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
    data: dict[str, list[dict[str, Any]]] = {}
    dims = sizes.dims
    steps = [(f"sweep over (ρ, γ), d = {d}", d) for d in dims]
    rest = (
        ("bounds of theorems 2.3 and 2.5", "bounds", _bounds),
        ("middle phase", "middle_phase", _middle_phase),
        ("Gaussian spacings", "spacings", _spacings),
    )
    total = len(steps) + len(rest)
    data["sweep"] = []
    for done, (title, d) in enumerate(steps):
        if progress is not None:
            progress(done, total, title)
        data["sweep"] += _sweep(sizes, d, generator, lines)
    for done, (title, name, step) in enumerate(rest):
        if progress is not None:
            progress(len(steps) + done, total, title)
        data[name] = step(sizes, generator, lines)
    if progress is not None:
        progress(total, total, "done")
    sweep = data["sweep"]
    drawn = {
        "angle_ratio": lambda: figures.draw_sweep(sweep, "angle_ratio"),
        "jacobian_norm": lambda: figures.draw_sweep(sweep, "jacobian_norm"),
        "bounds": lambda: figures.draw_bounds(data["bounds"]),
        "middle_phase": lambda: figures.draw_middle_phase(data["middle_phase"]),
        "spacings": lambda: figures.draw_spacings(data["spacings"]),
    }
    largest = [row for row in sweep if row["d"] == dims[-1]]
    return Experiment("phase", lines, data, drawn, (lambda axes: figures.draw_strip_panel(axes, largest),))


def _sweep(sizes: Sizes, d: int, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    n, cells = sizes.n, sizes.cells
    rhos = [0.9 * (step + 0.5) / cells for step in range(cells)]
    gammas = [5.0 * (step + 0.5) / cells for step in range(cells)]
    points = list(phase.sweep(n, d, rhos, gammas, generator, draws=sizes.draws))
    x, beta = tokens.almost_simplex(n, d, 0.5, generator), 3.0 * math.log(n)
    eta, error = phase.jacobian_norm(x, beta, 16, generator)
    where = f"d={d} n={n} ρ=0.5 γ=3"
    lines.append(
        Comparison("η, Hutchinson against the closed form", where, jacobian.jacobian_norm(x, beta), eta, error)
    )
    if d >= n:  # below, cosines scatter too much for the transition to be that of the simplex
        predicted = simplex.angle_ratio(n, 0.5, beta)
        lines.append(Comparison("λ, against the simplex", where, predicted, phase.angle_ratio(x, beta)))
    # Each draw has a z₀ of its own: the tokens of one draw share it, and with it their length.
    draws = [tokens.almost_simplex(1, d, 0.5, generator) for _ in range(2000)]
    inverse = torch.cat(draws).square().sum(-1).reciprocal() * (1.0 - 1.0 / d)
    predicted = (1.0 - 1.0 / d) * d / (d - 2.0)  # E 1/‖x‖² = d/(d−2) for N(0, I/d)
    lines.append(Comparison("η for γ → ∞, mean over draws", f"d={d}", predicted, *mean(inverse)))
    return [{"n": n, "d": d, **point._asdict()} for point in points]


def _bounds(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """min cosine, distance from the identity and η over γ, each with its bound; d is large enough for Assumption 2."""
    n, d, rho, alpha = sizes.n, 4 * sizes.n, 0.5, 0.5
    x = tokens.almost_simplex(n, d, rho, generator)
    x = x * (0.8 + 0.4 * torch.rand(n, 1, generator=generator, dtype=x.dtype, device=generator.device))
    given, y = bounds.spread(x), phase.directions(x)
    off = ~torch.eye(n, dtype=torch.bool, device=x.device)
    found: list[dict[str, Any]] = []
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
            | {"eta": jacobian.jacobian_norm(x, beta), "eta_upper": bounds.jacobian_upper_bound(given, beta)}
            | {"eta_lower": bounds.jacobian_lower_bound(given, beta)}
        )
    checks = {
        "min ⟨y'_i, y'_j⟩ ≥ bound": [row["cosine"] >= row["cosine_bound"] for row in found],
        "the same with residual": [row["residual_cosine"] >= row["residual_cosine_bound"] for row in found],
        "max ‖ATT(y_i) − y_i‖ ≤ bound": [row["moved"] <= row["moved_bound"] for row in found],
        "η ≤ upper bound": [row["eta"] <= row["eta_upper"] for row in found],
        "η ≥ lower bound": [row["eta"] >= row["eta_lower"] for row in found],
    }
    where = f"n={n} d={d}, share of {len(found)} values of γ"
    lines += [Comparison(name, where, 1.0, sum(holds) / len(holds)) for name, holds in checks.items()]
    return found


def _middle_phase(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """The share of a row's weight on itself, on near and on far tokens: groups of √n tokens, through attention."""
    n, size = sizes.group**2, sizes.group
    y = tokens.groups(n, size, FAR, NEAR)
    members = torch.eye(n // size, dtype=y.dtype, device=y.device).repeat_interleave(
        size, 0
    )  # value: which group a token is in
    found = []
    for step in range(1, 25):
        gamma = step * 0.2
        beta = gamma * math.log(n)
        request = StatsRequest(entropy=False, lse=False, max_logit=False)
        shares, stats = attention_with_stats(y[None], y[None], members[None], scale=beta, request=request)
        own = float(stats.w_max.flatten()[0])
        group = float(shares[0, 0, 0])
        exact = middle_phase.row_mass(n, size - 1, FAR, NEAR, beta)
        found.append(
            {"n": n, "gamma": gamma, "own": own, "near": group - own, "far": 1.0 - group}
            | {f"{name}_exact": value for name, value in exact._asdict().items()}
        )
        if step in (2, 10, 24):
            where = f"n={n} γ={gamma:g} τ={TAU:g}"
            lines.append(Comparison("share of near tokens", where, exact.near, group - own))
    edges = middle_phase.phase_edges(TAU, (FAR, FAR), (NEAR, NEAR))
    at = 0.5 * (edges.near_above + edges.near_below)
    far_n = 10**12
    mass = middle_phase.row_mass(far_n, 10**6 - 1, FAR, NEAR, at * math.log(far_n))
    lines.append(Comparison("limit of the share of near tokens", f"n=10¹² γ={at:.3g}", 1.0, mass.near))
    for row in found:
        row.update(edges._asdict())
    return found


def _spacings(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """Gaps of the largest Gaussian scores, and the largest weight: as printed, in the limit, and measured."""
    n, rows, draws = sizes.scores, sizes.rows, 25 * sizes.rows
    scores = families.sample("gaussian", n, rows, generator)
    top = scores.topk(17, dim=-1).values
    found: list[dict[str, Any]] = []
    scale = spacings.quantile(n)
    for k in (2, 3, 5, 9, 17):
        gap = scale * (top[:, 0] - top[:, k - 1])
        exact = scale * spacings.mean_gap(n, k)
        found.append(
            {"kind": "gap", "n": n, "x": k, "printed": k - 1.0, "limit": spacings.mean_gap_limit(k), "exact": exact}
            | {"measured": float(gap.mean()), "standard_error": mean(gap).error}
        )
        if k in (2, 9):
            lines.append(Comparison("t_n·E(a₁ − a_k)", f"n={n} k={k}", exact, *mean(gap)))
    for t in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
        weights = row_statistics(scores, t * math.sqrt(2.0 * math.log(n))).w_max
        found.append(
            {"kind": "weight", "n": n, "x": t, "measured": float(weights.mean()), "standard_error": mean(weights).error}
            | {"printed": float(spacings.printed_top_weight(t, draws, generator).mean())}
            | {"limit": poisson_dirichlet.mean_largest(t) if t > 1.0 else 0.0}
        )
    return found
