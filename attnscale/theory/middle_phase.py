"""Appendix C of seed 004: between averaging all tokens and keeping each apart, a phase that sees the near ones only.

Assumption 3: each token has about n^τ near ones with cosines in [ρ₃, ρ₄], all others in [ρ₁, ρ₂] with ρ₂ < ρ₃.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attnscale._util.checks import read_int
from attnscale.errors import reject


class PhaseEdges(NamedTuple):
    """Ranges of γ in Lemma C.1: far tokens dominate below the first, near ones between, the own one above the last."""

    far_below: float
    near_above: float
    near_below: float
    own_above: float

    @property
    def has_middle(self) -> bool:
        """Whether some γ lets the near tokens dominate: (1−τ)(1−ρ₂) + ρ₂ < ρ₃, in other words."""
        return self.near_above < self.near_below


class RowMass(NamedTuple):
    """How a row's weight is shared out among the token itself, its near tokens and all others."""

    own: float
    near: float
    far: float


def phase_edges(tau: float, far: tuple[float, float], near: tuple[float, float]) -> PhaseEdges:
    """The edges of Lemma C.1 and Theorem C.2 from τ, [ρ₁, ρ₂] and [ρ₃, ρ₄].

    >>> phase_edges(0.5, far=(0.0, 0.0), near=(0.75, 0.75))
    PhaseEdges(far_below=0.66..., near_above=0.66..., near_below=2.0, own_above=2.0)
    """
    if not 0.0 < tau <= 1.0:
        reject("tau", tau, "a number in (0, 1]")
    if not 0.0 <= far[0] <= far[1] < near[0] <= near[1] < 1.0:
        reject("near", near, f"cosines above far={far} and below 1")
    return PhaseEdges(
        far_below=min(1.0 / (1.0 - far[0]), (1.0 - tau) / (near[1] - far[0])),
        near_above=(1.0 - tau) / (near[0] - far[1]),
        near_below=tau / (1.0 - near[0]),
        own_above=max(1.0 / (1.0 - far[1]), tau / (1.0 - near[1])),
    )


def row_mass(n: int, near_tokens: int, far: float, near: float, beta: float) -> RowMass:
    """The three shares of a row with `near_tokens` tokens at cosine `near` and the rest at `far`, exact at every n.

    >>> row_mass(4, 1, 0.0, 0.5, 0.0)
    RowMass(own=0.25, near=0.25, far=0.5)
    """
    near_tokens = read_int("near_tokens", near_tokens, f"an int from 0 to n−1={n - 1}", least=0, most=n - 1)
    logs = [0.0, _log(near_tokens) - beta * (1.0 - near), _log(n - 1 - near_tokens) - beta * (1.0 - far)]
    top = max(logs)
    total = sum(math.exp(value - top) for value in logs)
    return RowMass(*(math.exp(value - top) / total for value in logs))


def _log(count: int) -> float:
    return math.log(count) if count else -math.inf
