"""Tokens on a simplex (seed 004, Assumption 1): closed forms against attention, their limits, and many layers."""

from __future__ import annotations

import math
from typing import Any

import torch

from attnscale.statistics import StatsRequest
from attnscale.statistics.gaps import accumulation_scale
from attnscale.theory import depth, phase, simplex, tokens
from attnscale.theory.experiment import Comparison, Experiment, Progress
from attnscale.theory.figures import simplex as figures

CASES = ((0.3, 1.0, 1.0, 0.0), (0.5, 2.0, 2.0, 0.5), (0.6, 0.5, 4.0, 1.5))  # ρ, q, γ, α
RHO = 0.5
LENGTHS = (10**3, 10**6, 10**9, 10**12)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Compare the closed forms with this package's attention, with their limits, and iterate them over layers."""
    lines: list[Comparison] = []
    data: dict[str, list[dict[str, Any]]] = {}
    steps = (
        ("closed forms against attention", "closed_forms", _closed_forms),
        ("finite n against the limit", "limits", _limits),
        ("many layers", "layers", _layers),
        ("layers until collapse", "lifetime", _lifetime),
    )
    for done, (title, name, step) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), title)
        data[name] = step(quick, lines)
    if progress is not None:
        progress(len(steps), len(steps), "done")
    drawn = {
        "limits": lambda: figures.draw_limits(data["limits"]),
        "layers": lambda: figures.draw_layers(data["layers"], data["lifetime"]),
    }
    return Experiment("simplex", lines, data, drawn)


def _closed_forms(quick: bool, lines: list[Comparison]) -> list[dict[str, Any]]:
    n, small = (128, 16) if quick else (512, 32)
    found = []
    for rho, q, gamma, alpha in CASES:
        x, beta = tokens.simplex(n, n, rho, q), gamma * math.log(n)
        after = phase.layer(x, beta, alpha)
        cosine = float(phase.directions(after)[:2].prod(0).sum())
        stats = phase.layer_statistics(x, beta, StatsRequest(lse=False, max_logit=False))
        y = phase.directions(x)
        few, low = tokens.simplex(small, small + 3, rho, q), gamma * math.log(small)
        eta, error = phase.jacobian_norm(x, beta, 16, torch.Generator().manual_seed(0))
        where = f"ρ={rho:g} q={q:g} γ={gamma:g}"
        rows: list[tuple[str, str, float, float, float | None]] = [
            ("⟨y'_i, y'_j⟩", f"{where} α={alpha:g} n={n}", simplex.output_cosine(n, rho, beta, q, alpha), cosine, None),
            ("‖x'_i‖²", f"{where} α={alpha:g} n={n}", simplex.output_norm(n, rho, beta, q, alpha),
             float(after[0].square().sum()), None),
            ("w_max = A_ii", f"{where} n={n}", simplex.weights(n, rho, beta).own, float(stats.w_max.mean()), None),
            ("entropy", f"{where} n={n}", simplex.entropy(n, rho, beta), float(stats.entropy.mean()), None),
            ("Λ = ln n/(1−ρ)", f"{where} n={n}", simplex.critical_beta(n, rho),
             float(accumulation_scale(y @ y.T).median()), None),
            ("η, torch.func", f"{where} n={small}", simplex.jacobian_norm(small, small + 3, rho, low, q),
             phase.exact_jacobian_norm(few, low), None),
            ("η, Hutchinson", f"{where} n={n}", simplex.jacobian_norm(n, n, rho, beta, q), eta, error),
        ]  # fmt: skip
        lines += [Comparison(*row) for row in rows]
        found += [Comparison(*row)._asdict() for row in rows]
    return [{key: value for key, value in row.items() if value is not None} for row in found]


def _limits(quick: bool, lines: list[Comparison]) -> list[dict[str, Any]]:
    """Both quantities over γ at growing n, and the approach to each phase's limit."""
    critical = 1.0 / (1.0 - RHO)
    found = []
    for n in LENGTHS:
        for step in range(81):
            ratio = 0.5 + step / 80
            beta = ratio * critical * math.log(n)
            found.append(
                {"n": n, "ratio": ratio, "cosine": simplex.output_cosine(n, RHO, beta)}
                | {"jacobian": simplex.jacobian_norm(n, n, RHO, beta)}
            )
    for ratio in (0.75, 1.0, 1.25):
        gamma, n = ratio * critical, LENGTHS[-1]
        beta, where = gamma * math.log(n), f"ρ={RHO:g} γ/γ_c={ratio:g} n=d=10¹²"
        limit = simplex.output_cosine_limit(gamma, RHO)
        lines.append(Comparison("limit of ⟨y'_i, y'_j⟩", where, limit, simplex.output_cosine(n, RHO, beta)))
        limit = simplex.jacobian_norm_limit(gamma, RHO, n)
        lines.append(Comparison("limit of η", where, limit, simplex.jacobian_norm(n, n, RHO, beta)))
    return found


def _layers(quick: bool, lines: list[Comparison]) -> list[dict[str, Any]]:
    """1 − ρ through layers, in closed form for n = 1000; and the end-to-end Jacobian, measured on n tokens."""
    n, most = 1000, 30
    found = []
    for ratio in (0.8, 1.0, 1.5, 2.0):
        beta = ratio * simplex.critical_beta(n, RHO)
        for layer, state in enumerate(depth.trajectory(n, RHO, beta, most)):
            found.append({"n": n, "ratio": ratio, "alpha": 0.0, "layer": layer, "apart": state.apart, "q": state.q})
    beta = 0.8 * simplex.critical_beta(n, RHO)
    for layer, state in enumerate(depth.trajectory(n, RHO, beta, most, alpha=1.0)):
        found.append({"n": n, "ratio": 0.8, "alpha": 1.0, "layer": layer, "apart": state.apart, "q": state.q})
    tokens_used = 64 if quick else 256
    x = tokens.simplex(tokens_used, tokens_used, RHO)
    for ratio in (0.8, 2.5):
        beta = ratio * simplex.critical_beta(tokens_used, RHO)
        apart = depth.trajectory(tokens_used, RHO, beta, 3)[-1].apart
        after = phase.directions(phase.layers(x, beta, 3))
        measured = 0.5 * float((after[0] - after[1]).square().sum())
        where = f"γ/γ_c={ratio:g} n={tokens_used}"
        lines.append(Comparison("1 − ρ after 3 layers", where, apart, measured))
        predicted = simplex.jacobian_norm_limit(ratio / (1 - RHO), RHO, tokens_used)
        eta, error = phase.jacobian_norm(x, beta, 8, torch.Generator().manual_seed(0), depth=3)
        lines.append(Comparison("η of 3 layers, limit", where, predicted, eta, error))
    return found


def _lifetime(quick: bool, lines: list[Comparison]) -> list[dict[str, Any]]:
    found = []
    for ratio in (1.5, 1.75):
        for power in range(2, 9):
            n = 10**power
            beta = ratio * simplex.critical_beta(n, RHO)
            predicted = depth.lifetime(n, RHO, beta)
            if 3.0 < predicted < (3e3 if quick else 3e4):
                counted = depth.layers_until_collapse(n, RHO, beta, most=10**5)
                found.append({"n": n, "ratio": ratio, "predicted": predicted, "counted": counted})
    last = max(found, key=lambda row: float(row["predicted"]))
    where = f"γ/γ_c={last['ratio']:g} n={last['n']:.0e}"
    lines.append(Comparison("layers until 1 − ρ has halved", where, last["predicted"], float(last["counted"])))
    return found
