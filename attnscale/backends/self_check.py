"""Self-check of the kernels: small problems on a device, compared with the oracle on the CPU.

One causal attention call with grouped heads, a β per row and a partial last tile: output, gradients of query, key,
value and β, and statistics. Then decoding of its last row, and a softmax. The oracle and the error budgets are computed
on the CPU, so only the kernel results come from the device under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.backends.backend import MeasuringBackend
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context
from attnscale.statistics import StatsRequest
from attnscale_kernels.launch import multiplies_in_tf32

ROWS, DIM, HEADS, KV_HEADS = 80, 64, 2, 1
INSIDE = 8  # fp32 roundings allowed for the device's exp2 and summation order
NATS = 1e-3  # maximum error of a statistic
THRESHOLDS = (0.5, 2.0)  # of the gap counts


class _Inputs(NamedTuple):
    query: Tensor  # [1, HEADS, ROWS, DIM]
    key: Tensor  # [1, KV_HEADS, ROWS, DIM]; the same for value
    value: Tensor
    beta: Tensor  # [1, 1, ROWS]
    gradient: Tensor  # [1, HEADS, ROWS, DIM], of the output


def find_fault(
    kernels: MeasuringBackend, oracle: MeasuringBackend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Describe the first quantity whose error exceeds its budget; None if all are within budget.

    The budget of a tensor is twice the error of torch's own attention on the CPU, in the same dtype and on equally
    sharp logits, plus one rounding and `INSIDE` roundings of fp32. Exceptions of the kernels propagate.
    """
    inputs = _inputs(dtype)
    # TF32 has the mantissa of fp16, so the budget is the error of fp16.
    products = torch.float16 if dtype == torch.float32 and multiplies_in_tf32() else dtype
    exact, tensors = (_differentiate(backend, inputs, *where) for backend, where in (
        (oracle, (torch.device("cpu"), torch.float64)), (kernels, (device, dtype)),
    ))  # fmt: skip
    budgets = _yardstick(oracle, inputs, products)
    roundings = torch.finfo(dtype).eps + INSIDE * torch.finfo(torch.float32).eps
    for name, found in tensors.items():
        error, budget = _size(found - exact[name]), 2 * budgets[name] + roundings * _size(exact[name])
        if not error <= budget:  # also true for NaN
            return f"{name} has an error of {error:.1e}; at most {budget:.1e} is accepted"
    unit = torch.finfo(torch.float16 if products != dtype else torch.float32).eps
    with torch.no_grad():
        faults = (*_statistics_faults(kernels, oracle, inputs, device, unit), *_softmax_faults(inputs, device))
    return next(iter(faults), None)


def _inputs(dtype: torch.dtype) -> _Inputs:
    """Return the inputs of the problem, on the CPU; the global generators are not used."""
    generator = torch.Generator().manual_seed(20)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, ROWS, DIM, generator=generator, device="cpu").to(dtype)

    beta = torch.log(2.0 + torch.arange(ROWS, device="cpu", dtype=torch.float32))[None, None]
    return _Inputs(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), beta, normal(HEADS))


def _call(inputs: _Inputs, device: torch.device, dtype: torch.dtype, rows: slice = slice(None)) -> AttentionCall:
    """Return the problem, or some of its rows, as a call on a device; β is at least fp32."""
    query, key, value = (x.detach().to(device, dtype) for x in inputs[:3])
    query, beta = query[:, :, rows], inputs.beta.to(device, torch.promote_types(dtype, torch.float32))[..., rows]
    queries = query.shape[2]
    context = Context(queries, ROWS, device, causal=True, slot=ROWS - queries)
    return AttentionCall(query, key, value, context, DIM**-0.5, 0.0, None, None, beta)


def _differentiate(
    backend: MeasuringBackend, inputs: _Inputs, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the output, all gradients and the decoded output of the last row, on the CPU in fp64."""
    call = _call(inputs, device, dtype)
    leaves = [x for x in (call.query, call.key, call.value, call.beta) if isinstance(x, Tensor)]
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        output = backend.run(call)
        found = torch.autograd.grad(output, leaves, inputs.gradient.to(device, output.dtype))
    with torch.no_grad():
        decoded = backend.run(_call(inputs, device, dtype, slice(ROWS - 1, None)))
    names = ("output", "gradient of the query", "of the key", "of the value", "of β", "decoded output")
    return {name: x.detach().to("cpu", torch.float64) for name, x in zip(names, (output, *found, decoded), strict=True)}


def _yardstick(oracle: MeasuringBackend, inputs: _Inputs, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of torch's attention on the CPU in a dtype, with rounded β·q as the query, by quantity."""
    beta = inputs.beta.double()[..., None]
    sharp = inputs._replace(query=(inputs.query.double() * beta).to(dtype), beta=torch.ones_like(inputs.beta))
    exact = _differentiate(oracle, sharp, torch.device("cpu"), torch.float64)
    leaves = query, key, value = tuple(x.detach().to(dtype).requires_grad_() for x in sharp[:3])
    with torch.enable_grad():
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        of_query, *others = torch.autograd.grad(output, leaves, inputs.gradient.to(dtype))
    error = {
        name: own.detach().double() - exact[name] for name, own in zip(exact, (output, of_query, *others), strict=False)
    }
    of_sharp = error["gradient of the query"]
    error |= {
        "gradient of the query": of_sharp * beta,
        "of β": (of_sharp * inputs.query.double()).sum((0, 1, 3)),
        "decoded output": error["output"],
    }
    return {name: _size(x) for name, x in error.items()}


def _statistics_faults(
    kernels: MeasuringBackend, oracle: MeasuringBackend, inputs: _Inputs, device: torch.device, unit: float
) -> Iterator[str]:
    """Yield the faults of the statistics; `unit` is the rounding error of the products."""
    ours = StatsRequest(gap_thresholds=THRESHOLDS, accumulation="bracket")
    found = kernels.measure(_call(inputs, device, inputs.query.dtype), ours).stats
    exact_call = _call(inputs, torch.device("cpu"), torch.float64)
    plain = oracle.statistics(exact_call, StatsRequest(accumulation="exact"))
    room = NATS + 2 * unit * float(_host(plain.max_logit).abs().max())
    for name in ("lse", "max_logit", "entropy"):
        error = float((_host(getattr(found, name)) - _host(getattr(plain, name))).abs().max())
        if not error <= room:
            yield f"{name} has an error of {error:.1e}; at most {room:.1e} is accepted"
    # Keys whose gap differs from the threshold by less than the error may be counted or not.
    low, high = (_counts(oracle, exact_call, side * room) for side in (-1, 1))
    counts = _host(found.gap_counts)
    if not bool(((low <= counts) & (counts <= high)).all()):
        yield "gap counts differ from those of the scores"
    # 1/Λ is the minimum of gap/ln k over k ≥ 2, so a score error changes it by at most 2/ln 2 times that error.
    (exact, _), (lower, upper) = ((1 / _host(x) for x in stats.accumulation or ()) for stats in (plain, found))
    if not bool(((upper - 3 * room <= exact) & (exact <= lower + 3 * room)).all()):
        yield "the bracket does not contain Λ"


def _counts(oracle: MeasuringBackend, call: AttentionCall, shift: float) -> Tensor:
    request = StatsRequest(False, False, False, False, gap_thresholds=tuple(t + shift for t in THRESHOLDS))
    return _host(oracle.statistics(call, request).gap_counts)


def _softmax_faults(inputs: _Inputs, device: torch.device) -> Iterator[str]:
    """Yield the faults of the softmax kernel; weights may be off by two roundings."""
    from attnscale_kernels.softmax.op import row_softmax

    scores = inputs.query[0, 0]
    error = (_host(row_softmax(scores.to(device)).weights) - scores.double().softmax(-1)).abs().max()
    if not float(error) <= 2 * torch.finfo(scores.dtype).eps:
        yield f"softmax weights have an error of {float(error):.1e}"


def _host(x: Any) -> Tensor:
    """Return a tensor of requested statistics on the CPU in fp64."""
    wide: Tensor = x.detach().to("cpu", torch.float64)
    return wide


def _size(x: Tensor) -> float:
    """Return the root mean square; unlike the maximum, it hardly depends on single roundings."""
    return float(x.square().mean().sqrt())
