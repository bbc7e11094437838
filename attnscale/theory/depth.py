"""Many layers on a simplex: the configuration stays one, so (ρ, q) of each layer gives that of the next, exactly.

What survives many layers differs by phase. Below the critical γ a layer brings ρ nearer to 1, which raises 1/(1−ρ):
what is subcritical stays so. On the critical line the first layer moves ρ to 4ρ/(1+3ρ), for which the same γ is
subcritical, so criticality lasts one layer. Above it each layer moves ρ by 2ρ(1−ρ)·n^(1−γ(1−ρ)), and the configuration
lasts for about `lifetime` layers, a power of n that depends on γ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attnscale._util.checks import read_int
from attnscale.theory import simplex


class Configuration(NamedTuple):
    """A simplex between layers: cosine ρ (as 1 − ρ, which keeps its digits near collapse) and squared norm q."""

    apart: float
    q: float

    @property
    def rho(self) -> float:
        """The cosine between any two tokens."""
        return 1.0 - self.apart


def trajectory(n: int, rho: float, beta: float, depth: int, q: float = 1.0, alpha: float = 0.0) -> list[Configuration]:
    """The configurations before the first layer and after each of `depth` layers with the same β and residual.

    >>> [round(state.rho, 6) for state in trajectory(10**9, 0.5, 2 * math.log(10**9), depth=3)]
    [0.5, 0.8, 1.0, 1.0]
    """
    depth = read_int("depth", depth, "an int >= 0", least=0)
    states = [Configuration(1.0 - rho, q)]
    for _ in range(depth):
        apart, norm = states[-1]
        # Once ρ rounds to 1 all tokens are one, and the layer adds that one to its residual.
        if apart < 2**-53:
            states.append(Configuration(apart, (1.0 + alpha * math.sqrt(norm)) ** 2))
            continue
        ratio = simplex.angle_ratio(n, 1.0 - apart, beta, norm, alpha)
        states.append(Configuration(apart * ratio, simplex.output_norm(n, 1.0 - apart, beta, norm, alpha)))
    return states


def lifetime(n: int, rho: float, beta: float) -> float:
    """About how many layers without residual a supercritical simplex lasts: e^(β(1−ρ))/((n−1)·2ρ(1−ρ)β).

    A layer adds 2ρ(1−ρ)ε to ρ where ε = (n−1)e^(−β(1−ρ)) is the weight on other tokens, and ε grows by e^(βδ) when ρ
    has grown by δ; the solution of that equation leaves every bound at this depth.

    >>> round(lifetime(1000, 0.5, 4 * math.log(1000)), 1)
    72.5
    """
    log_layers = beta * (1.0 - rho) - math.log(n - 1) - math.log(2.0 * rho * (1.0 - rho) * beta)
    return math.exp(log_layers)


def layers_until_collapse(n: int, rho: float, beta: float, most: int = 10**6) -> int | None:
    """The first layer after which 1 − ρ is less than half of what it was; None if none of the first `most` is.

    >>> layers_until_collapse(10**6, 0.5, math.log(10**6))
    1
    """
    state = Configuration(1.0 - rho, 1.0)
    for depth in range(1, most + 1):
        ratio = simplex.angle_ratio(n, state.rho, beta)
        state = Configuration(state.apart * ratio, 1.0)
        if state.apart < 0.5 * (1.0 - rho):
            return depth
    return None
