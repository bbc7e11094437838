"""Whether the kernels compute small problems on a device as the oracle does on the host.

One causal attention with grouped heads, a β per row and a ragged last tile: output, gradients of query, key, value and
β, statistics; the decoding of its last row; and a softmax. The oracle and the yardstick run on the CPU, so that nothing
that is compared comes from the device under test except what the kernels give.
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
INSIDE = 8  # roundings of fp32 that a device's powers of two and order of sums may cost where the CPU's do not
NATS = 1e-3  # how far a statistic may be from the exact one
THRESHOLDS = (0.5, 2.0)  # of the gap counts


class _Inputs(NamedTuple):
    query: Tensor  # [1, HEADS, ROWS, DIM]
    key: Tensor  # [1, KV_HEADS, ROWS, DIM], and so the value
    value: Tensor
    beta: Tensor  # [1, 1, ROWS]
    gradient: Tensor  # [1, HEADS, ROWS, DIM], of the output


def find_fault(
    kernels: MeasuringBackend, oracle: MeasuringBackend, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The first quantity whose error is beyond its budget, in words; None if there is none.

    Tensors may err twice as much as torch's own attention on the CPU, in the same dtype and on logits as sharp, plus
    one rounding and what fp32 inside may differ by. Whatever the kernels raise is raised here.
    """
    inputs = _inputs(dtype)
    # TF32 has the mantissa of fp16, whose error is then the yardstick.
    products = torch.float16 if dtype == torch.float32 and multiplies_in_tf32() else dtype
    exact, tensors = (_differentiate(backend, inputs, *where) for backend, where in (
        (oracle, (torch.device("cpu"), torch.float64)), (kernels, (device, dtype)),
    ))  # fmt: skip
    budgets = _yardstick(oracle, inputs, products)
    roundings = torch.finfo(dtype).eps + INSIDE * torch.finfo(torch.float32).eps
    for name, found in tensors.items():
        error, budget = _size(found - exact[name]), 2 * budgets[name] + roundings * _size(exact[name])
        if not error <= budget:  # also where it is NaN
            return f"{name} has an error of {error:.1e}, where {budget:.1e} is accepted"
    unit = torch.finfo(torch.float16 if products != dtype else torch.float32).eps
    with torch.no_grad():
        faults = (*_statistics_faults(kernels, oracle, inputs, device, unit), *_softmax_faults(inputs, device))
    return next(iter(faults), None)


def _inputs(dtype: torch.dtype) -> _Inputs:
    """The problem, on the CPU; the global generators are left alone."""
    generator = torch.Generator().manual_seed(20)

    def normal(heads: int) -> Tensor:
        return torch.randn(1, heads, ROWS, DIM, generator=generator, device="cpu").to(dtype)

    beta = torch.log(2.0 + torch.arange(ROWS, device="cpu", dtype=torch.float32))[None, None]
    return _Inputs(normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), beta, normal(HEADS))


def _call(inputs: _Inputs, device: torch.device, dtype: torch.dtype, rows: slice = slice(None)) -> AttentionCall:
    """The problem, or some of its rows, as a call on a device; β stays in fp32 or wider."""
    query, key, value = (x.detach().to(device, dtype) for x in inputs[:3])
    query, beta = query[:, :, rows], inputs.beta.to(device, torch.promote_types(dtype, torch.float32))[..., rows]
    queries = query.shape[2]
    context = Context(queries, ROWS, device, causal=True, slot=ROWS - queries)
    return AttentionCall(query, key, value, context, DIM**-0.5, 0.0, None, None, beta)


def _differentiate(
    backend: MeasuringBackend, inputs: _Inputs, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output and all gradients, and the output of the last row decoded by itself; on the CPU in fp64."""
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
    """The error of torch's attention on the CPU in a dtype, given β·q rounded as its query, by the names above."""
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
    """What is wrong with statistics; `unit` is the rounding of the products."""
    ours = StatsRequest(gap_thresholds=THRESHOLDS, accumulation="bracket")
    found = kernels.measure(_call(inputs, device, inputs.query.dtype), ours).stats
    exact_call = _call(inputs, torch.device("cpu"), torch.float64)
    plain = oracle.statistics(exact_call, StatsRequest(accumulation="exact"))
    room = NATS + 2 * unit * float(_host(plain.max_logit).abs().max())
    for name in ("lse", "max_logit", "entropy"):
        error = float((_host(getattr(found, name)) - _host(getattr(plain, name))).abs().max())
        if not error <= room:
            yield f"{name} has an error of {error:.1e}, where {room:.1e} is accepted"
    # A count may differ by keys whose gap is within an error of the threshold.
    low, high = (_counts(oracle, exact_call, side * room) for side in (-1, 1))
    counts = _host(found.gap_counts)
    if not bool(((low <= counts) & (counts <= high)).all()):
        yield "gap counts are not those of the scores"
    # 1/Λ is the least gap over ln k, k ≥ 2: with the scores it moves by 2/ln 2 of their error at most.
    (exact, _), (lower, upper) = ((1 / _host(x) for x in stats.accumulation or ()) for stats in (plain, found))
    if not bool(((upper - 3 * room <= exact) & (exact <= lower + 3 * room)).all()):
        yield "the bracket does not hold Λ"


def _counts(oracle: MeasuringBackend, call: AttentionCall, shift: float) -> Tensor:
    request = StatsRequest(False, False, False, False, gap_thresholds=tuple(t + shift for t in THRESHOLDS))
    return _host(oracle.statistics(call, request).gap_counts)


def _softmax_faults(inputs: _Inputs, device: torch.device) -> Iterator[str]:
    """What is wrong with the softmax of a matrix of scores: weights may be off by two roundings."""
    from attnscale_kernels.softmax.op import row_softmax

    scores = inputs.query[0, 0]
    error = (_host(row_softmax(scores.to(device)).weights) - scores.double().softmax(-1)).abs().max()
    if not float(error) <= 2 * torch.finfo(scores.dtype).eps:
        yield f"weights of the softmax have an error of {float(error):.1e}"


def _host(x: Any) -> Tensor:
    """A tensor of statistics that were asked for, on the CPU in fp64."""
    wide: Tensor = x.detach().to("cpu", torch.float64)
    return wide


def _size(x: Tensor) -> float:
    """The root mean square: the largest of a few thousand roundings is luck."""
    return float(x.square().mean().sqrt())
