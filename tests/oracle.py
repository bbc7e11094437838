"""Reference results for tests: fp64 on the same quantised inputs, and the error of torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale import scaled_dot_product_attention

Result = dict[str, Tensor]


def tensors(
    shape_q: tuple[int, ...], shape_kv: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (shape_q, shape_kv, shape_kv)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def differentiate(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, size: float = 1.0) -> Result:
    """Output and gradients for a fixed upstream gradient of the given size."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    generator = torch.Generator().manual_seed(99)
    upstream = (size * torch.randn(out.shape, generator=generator, dtype=torch.float64)).to(out.dtype)
    gradients = torch.autograd.grad(out, inputs, upstream)
    return {"out": out.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def exact(q: Tensor, k: Tensor, v: Tensor, size: float = 1.0, **arguments: object) -> Result:
    """The reference backend in fp64."""
    wide = {name: x.double() if _is_float(x) else x for name, x in arguments.items()}
    oracle = partial(scaled_dot_product_attention, backend="reference", **wide)
    return differentiate(oracle, q.double(), k.double(), v.double(), size)


def torch_error(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | float, visible: Tensor | None, *, gqa: bool = False
) -> dict[str, float]:
    """The error of torch's SDPA on equally sharp logits, with the rounded β·q as its exact input.

    The gradient of the query is multiplied by β, by the chain rule.
    """
    factor = torch.as_tensor(beta, dtype=torch.float64)[..., None]
    sharp = (q.double() * factor).to(q.dtype)

    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, attn_mask=visible, enable_gqa=gqa)

    own, true = differentiate(attend, sharp, k, v), exact(sharp, k, v, attn_mask=visible, enable_gqa=gqa)
    errors = {name: own[name].double() - true[name] for name in own}
    errors["dq"] = errors["dq"] * factor
    return {name: worst_row(error) for name, error in errors.items()}


def worst_row(x: Tensor) -> float:
    """The largest root mean square over the last axis; the error of a single element would be arbitrary."""
    return x.square().mean(-1).sqrt().amax().item() if x.numel() else 0.0


def mean_row(x: Tensor) -> float:
    """The root mean square over all rows, for results whose worst row is a cancellation of two roundings."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_within_budget(
    got: Result, true: Result, own: dict[str, float], times: float, size: Callable[[Tensor], float] = worst_row
) -> None:
    """The error of the worst row is at most `times` that of torch's worst row, plus one rounding of the result.

    fp64 is the precision of the oracle itself, so there the two only have to agree.
    """
    for name, value in got.items():
        assert torch.isfinite(value).all(), f"{name} is not finite"
        if value.dtype == torch.float64:
            torch.testing.assert_close(value, true[name], rtol=1e-12, atol=1e-12)
            continue
        error = size(value.double() - true[name])
        budget = times * own[name] + torch.finfo(value.dtype).eps * size(true[name])
        assert error <= budget, (
            f"{name}: error {error:.2e} is over the budget {budget:.2e} (torch's own {own[name]:.2e})"
        )


@cache
def visibility(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: int | None = None,
    offset: int = 0,
    documents: tuple[int, ...] | None = None,
    padding: tuple[bool, ...] | None = None,
) -> Tensor:
    """The visible keys of each row, [Tq, Tk], decided pair by pair from the definitions of the rules."""
    table = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        own = offset + row
        for key in range(keys):
            seen = not (causal and key > own)
            seen = seen and not (window is not None and abs(own - key) >= window)
            seen = seen and not (documents is not None and documents[own] != documents[key])
            seen = seen and not (padding is not None and padding[key])
            table[row, key] = seen
    return table


def additive(visible: Tensor, hidden: float = -math.inf) -> Tensor:
    """A bool mask as an additive one."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, hidden)


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point
