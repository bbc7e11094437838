"""Estimates from samples, with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float

    @property
    def random_error(self) -> float | None:
        """The standard error; None if it is only rounding because nothing is random.

        >>> Estimate(1.0, 1e-16).random_error is None
        True
        """
        return self.error if self.error > ROUNDING * abs(self.value) else None

    def columns(self) -> dict[str, float]:
        """The columns `measured` and `standard_error` of a table."""
        return {"measured": self.value, "standard_error": self.error}


def mean(samples: Tensor) -> Estimate:
    """The mean of independent samples [...].

    >>> mean(torch.tensor([1.0, 3.0])).value
    2.0
    """
    return Estimate(samples.mean().item(), samples.std().item() / math.sqrt(samples.numel()))


def deviation(samples: Tensor) -> Estimate:
    """The standard deviation of independent samples [...]; its error follows from the fourth moment.

    >>> deviation(torch.tensor([0.0, 1.0, 2.0])).value
    1.0
    """
    centred = samples - samples.mean()
    variance, fourth = centred.square().mean().item(), centred.pow(4).mean().item()
    error = math.sqrt(max(0.0, fourth - variance**2) / samples.numel()) / (2 * math.sqrt(variance))
    return Estimate(samples.std().item(), error)


def median(samples: Tensor, draws: int = 200) -> Estimate:
    """The median of samples [...], which may be infinite; its error is a bootstrap estimate.

    >>> median(torch.tensor([1.0, 2.0, torch.inf])).value
    2.0
    """
    flat = samples.flatten()
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(flat.numel(), (draws, flat.numel()), generator=generator, device=generator.device)
    medians = flat[chosen].median(-1).values
    finite = medians[medians.isfinite()]
    return Estimate(flat.median().item(), finite.std().item() if finite.numel() > 1 else 0.0)


def slope(x: Sequence[float], y: Sequence[float], errors: Sequence[float] | None = None) -> Estimate:
    """The slope of the least-squares line through points with independent errors.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    Estimate(value=2.0, error=0.0)
    """
    centre = math.fsum(x) / len(x)
    total = math.fsum((a - centre) ** 2 for a in x)
    weights = [(a - centre) / total for a in x]
    error = math.sqrt(math.fsum((w * e) ** 2 for w, e in zip(weights, errors or [0.0] * len(x), strict=True)))
    return Estimate(math.fsum(w * b for w, b in zip(weights, y, strict=True)), error)
