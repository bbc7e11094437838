"""Inputs and budgets for the row softmax kernels: torch in fp64 and in the same dtype."""

from __future__ import annotations

import math

import torch
from oracle import assert_within_budget, mean_row
from torch import Tensor

THRESHOLDS = (0.0, 0.25, 1.0, 3.5, math.inf)
STATISTICS = ("lse", "max_logit", "w_max", "entropy")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_mask(*shape: int, seed: int = 5) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.3


def by_torch(
    scores: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    upstream: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """All results from torch's own softmax in a dtype; statistics at least in fp32, as promised."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (scores, beta) + (() if bias is None else (bias,))]
    raw = inputs[0] if bias is None else inputs[0] + inputs[2]
    hidden = raw.detach() < -1e29
    hidden = hidden if mask is None else hidden | ~mask
    hidden = hidden if bias is None else hidden | (bias <= -1e4)
    empty = hidden.all(-1, keepdim=True)
    logits = (raw * inputs[1][..., None]).masked_fill(hidden, -math.inf)
    weights = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    result = {"weights": weights.detach()}
    if upstream is not None:
        gradients = torch.autograd.grad(weights, inputs, upstream.to(dtype))
        result |= dict(zip(("dscores", "dbeta", "dbias"), gradients, strict=False))
    wide = dtype if dtype == torch.float64 else torch.float32
    logits = logits.detach().to(wide) if dtype == wide else (raw.detach().to(wide) * beta[..., None].to(wide))
    logits = logits.masked_fill(hidden, -math.inf)
    result["lse"] = logits.logsumexp(-1)
    result["max_logit"] = logits.amax(-1)
    p = logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    result["w_max"] = p.amax(-1)
    result["entropy"] = torch.special.entr(p).sum(-1)
    return result


def counts_by_torch(scores: Tensor, mask: Tensor | None, bias: Tensor | None, thresholds: tuple[float, ...]) -> Tensor:
    raw = scores.float() if bias is None else scores.float() + bias.float()
    seen = torch.ones_like(raw, dtype=torch.bool) if mask is None else mask.expand_as(raw)
    seen = seen if bias is None else seen & (bias > -1e4)
    best = raw.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    return torch.stack([(seen & (best - raw <= t)).sum(-1) for t in thresholds], -1)


def assert_as_good_as_torch(
    got: dict[str, Tensor],
    scores: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    upstream: Tensor | None = None,
) -> None:
    """At most twice torch's own error plus one rounding; rows without visible keys are exact."""
    true = by_torch(scores, beta, mask, bias, upstream, torch.float64)
    own = by_torch(scores, beta, mask, bias, upstream, scores.dtype)
    empty = true["lse"] == -math.inf
    for name, value in (("lse", -math.inf), ("max_logit", -math.inf), ("w_max", 0.0), ("entropy", 0.0)):
        if name in got:
            assert got[name].dtype == torch.float32
            assert (got[name][empty] == value).all(), f"{name} of an empty row"
    for name in ("weights", "dscores"):
        if name in got:
            assert (got[name][empty] == 0).all(), f"{name} of an empty row"
    seen = {name: ~empty if name in STATISTICS else ... for name in got}
    errors = {name: mean_row(own[name][seen[name]].double() - true[name][seen[name]]) for name in got}
    values = {name: got[name][seen[name]] for name in got}
    assert_within_budget(values, {name: true[name][seen[name]] for name in got}, errors, times=2.0, size=mean_row)
