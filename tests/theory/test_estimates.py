"""Estimates: their errors are those of repeated samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnscale.theory import estimates
from attnscale.theory.estimates import Estimate


@pytest.mark.parametrize("estimate", [estimates.mean, estimates.deviation, estimates.median])
def test_the_standard_error_is_the_spread_of_repeated_estimates(estimate: Callable[[Tensor], Estimate]) -> None:
    draws = torch.randn(300, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    found = [estimate(row) for row in draws]
    spread = torch.tensor([one.value for one in found]).std().item()
    typical = torch.tensor([one.error for one in found]).median().item()
    assert typical == pytest.approx(spread, rel=0.45 if estimate is estimates.deviation else 0.2)


def test_the_slope_and_its_error_are_those_of_least_squares() -> None:
    x, errors = [0.0, 1.0, 3.0], [0.1, 0.2, 0.3]
    a = torch.tensor([[1.0, v] for v in x], dtype=torch.float64)
    inverse = torch.linalg.pinv(a)[1]
    y = torch.tensor([1.0, 4.0, -2.0], dtype=torch.float64)
    found = estimates.slope(x, y.tolist(), errors)
    assert found.value == pytest.approx((inverse @ y).item())
    assert found.error == pytest.approx(
        math.sqrt(sum((w * e) ** 2 for w, e in zip(inverse.tolist(), errors, strict=True)))
    )
