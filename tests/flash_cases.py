"""Cases for the flash kernels: inputs, naive attention in fp64, and error budgets.

A kernel may have twice the error of torch in the same dtype on equally sharp logits, plus one rounding. Torch means its
SDPA where it supports the feature, and naive attention otherwise. Errors are root mean squares, as in oracle.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from attnscale_kernels.device import keep, keep_by_slot
from attnscale_kernels.flash.launch import Backward, flash_backward, flash_forward
from attnscale_kernels.launch import Forward, Tile
from attnscale_kernels.visibility import Visibility

TILE = Tile(64, 64, 4, 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP32_ROUNDING = torch.finfo(torch.float32).eps
NATS = 4e-6  # budget of a statistic, and 16 roundings of the largest logit
GUARD = 96  # NaN elements around a tensor, more than a tile can overrun a row


@dataclass(frozen=True)
class Case:
    """One call, in the vocabulary of the test matrix."""

    sees: str = "causal"
    queries: int = 65
    keys: int = 65
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    beta: str = "per_row"
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    sharpness: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        """The differences from the plain case."""
        plain = Case()
        told = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        words = [str(told.pop("sees", self.sees))]
        return "-".join(words + [f"{name}={str(value).removeprefix('torch.')}" for name, value in told.items()])


class Seen(NamedTuple):
    """A visibility rule as kernel argument and as a dense table."""

    visibility: Visibility
    table: Tensor  # [B|1, H|1, Tq, Tk], bool
    bias: Tensor | None = None  # [B|1, H|1, Tq, Tk], finite, 0 for hidden keys


@dataclass
class Inputs:
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gradient: Tensor
    seen: Seen
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    kept: Tensor | None = None  # [B, H, Tq, Tk], bool: weights kept by dropout

    @property
    def options(self) -> dict:
        """Keyword arguments common to forward and backward."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "seed": self.seed,
        }


def inputs_of(case: Case) -> Inputs:
    """Random inputs surrounded by NaN, so that out-of-bounds reads show."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return guarded(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

    value_dim = case.value_dim or case.dim
    q = normal(case.batch, case.heads, case.queries, case.dim)
    k = normal(case.batch, case.kv_heads, case.keys, case.dim)
    v = normal(case.batch, case.kv_heads, case.keys, value_dim)
    gradient = normal(case.batch, case.heads, case.queries, value_dim)
    seen = RULES[case.sees](case.batch, case.heads, case.queries, case.keys, generator)
    dropped = case.dropout_p > 0.0
    seed = torch.tensor(0x1234_5678_9ABC + case.seed) if dropped else None
    return Inputs(
        q, k, v,
        guarded(BETAS[case.beta](case.batch, case.heads, case.queries, generator).float()),
        gradient,
        seen,
        scale=case.sharpness / math.sqrt(case.dim),
        softcap=case.softcap,
        sinks=normal(case.heads, dtype=torch.float32) if case.sinks else None,
        dropout_p=case.dropout_p,
        seed=seed,
        kept=draws(seed, (case.batch, case.heads, case.queries, case.keys), case.dropout_p) if dropped else None,
    )  # fmt: skip


def guarded(x: Tensor, around: float = math.nan) -> Tensor:
    """A contiguous copy in the middle of memory filled with NaN."""
    buffer = torch.full((x.numel() + 2 * GUARD,), around, dtype=x.dtype)
    inner = buffer[GUARD : GUARD + x.numel()].view(x.shape)
    inner.copy_(x)
    return inner


# Visibility rules, each from its definition.


def _places(queries: int, keys: int, slot: int | None = None) -> tuple[Tensor, Tensor]:
    """The slot of each row, by default aligned at the last key, and of each key."""
    slot = keys - queries if slot is None else slot
    return (slot + torch.arange(queries))[:, None], torch.arange(keys)[None, :]


def _moving(left: int | None, right: int | None, slot: int | None = None) -> Callable[..., Seen]:
    """Every row sees a fixed number of keys before and after its own slot."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        own, other = _places(queries, keys, slot)
        table = torch.ones(queries, keys, dtype=torch.bool)
        if left is not None:
            table &= other >= own - left
        if right is not None:
            table &= other <= own + right
        where = keys - queries if slot is None else slot
        return Seen(Visibility(slot=where, left=left, right=right), table[None, None])

    return rule


def _padded(side: str, right: int | None) -> Callable[..., Seen]:
    """Sequence b has 3 + 7·b hidden keys on one side, or all keys hidden."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        count = 3 + 7 * torch.arange(batch)[:, None]
        place = torch.arange(keys)[None]
        hidden = {"left": place < count, "right": place >= keys - count, "all": place >= 0 * count}[side]
        moving = _moving(None, right)(batch, heads, queries, keys, generator)
        table = moving.table & ~hidden[:, None, None]
        return Seen(moving.visibility._replace(padding=guarded(hidden, False)), table)

    return rule


def _bounded(kind: str) -> Callable[..., Seen]:
    """Intervals from tensors: packed causal documents, everything, arbitrary intervals, or a share of the keys each."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        own, other = _places(queries, keys)
        if kind == "any":
            ends = torch.randint(0, keys + 1, (2, batch, queries), generator=generator).sort(0).values
            start, stop = ends[0], ends[1]
        elif kind == "shares":
            borders = torch.arange(batch + 1) * keys // batch
            start, stop = (border[:, None].expand(-1, queries) for border in (borders[:-1], borders[1:]))
        else:
            borders = torch.tensor([0, 1, keys // 3, keys // 2 + 1, keys]).clamp(max=keys)
            document = torch.searchsorted(borders, own.flatten().clamp(min=0), right=True).clamp(max=4)
            start, after = borders[document - 1], borders[document]
            stop = torch.minimum(after, own.flatten() + 1) if kind == "causal" else after
            stop = torch.maximum(stop, start)
            start, stop = start[None], stop[None]
        table = (other >= start[..., None]) & (other < stop[..., None])
        return Seen(Visibility(start=start.int(), stop=stop.int()), table[:, None])

    return rule


def _chosen(per: str) -> Callable[..., Seen]:
    """A bool mask with hidden keys; a few rows see nothing."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        shape = {"batch": (batch, 1), "head": (1, heads), "both": (batch, heads)}[per]
        table = torch.rand(*shape, queries, keys, generator=generator) < 0.5
        table &= torch.rand(*shape, queries, 1, generator=generator) < 0.9
        return Seen(Visibility(mask=guarded(table, True)), table)

    return rule


def _biased(per: str, hidden: float | None = None, dtype: torch.dtype = torch.float32) -> Callable[..., Seen]:
    """An additive mask, in places low enough to hide keys."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        shape = {"all": (1, 1), "head": (1, heads), "both": (batch, heads)}[per]
        bias = torch.randn(*shape, queries, keys, generator=generator).to(dtype)
        table = torch.ones(*shape, queries, keys, dtype=torch.bool)
        if hidden is not None:
            table = torch.rand(*shape, queries, keys, generator=generator) < 0.6
        mask = bias.masked_fill(~table, hidden or 0.0)
        return Seen(Visibility(mask=guarded(mask)), table, bias.double().masked_fill(~table, 0.0))

    return rule


def _combined(*rules: Callable[..., Seen]) -> Callable[..., Seen]:
    """Visible only where every rule allows it."""

    def rule(batch: int, heads: int, queries: int, keys: int, generator: torch.Generator) -> Seen:
        whole = None
        for part in rules:
            seen = part(batch, heads, queries, keys, generator)
            if whole is None:
                whole = seen
                continue
            ours, plain = whole.visibility, Visibility()
            for name, value in seen.visibility._asdict().items():
                if value is not getattr(plain, name) and getattr(ours, name) is getattr(plain, name):
                    ours = ours._replace(**{name: value})
            bias = seen.bias if whole.bias is None else whole.bias
            whole = Seen(ours, whole.table & seen.table, bias)
        return whole

    return rule


RULES: dict[str, Callable[..., Seen]] = {
    "everything": _moving(None, None),
    "causal": _moving(None, 0),
    "causal_from_the_start": _moving(None, 0, slot=0),
    "causal_far_into_the_cache": _moving(None, 0, slot=40),
    "three_ahead": _moving(None, 3),
    "window_of_20": _moving(19, 0),
    "window_of_3": _moving(2, 0),
    "window_of_100": _moving(99, 0),
    "own_key": _moving(0, 0),
    "window_5_and_9": _moving(5, 9),
    "window_80_and_70": _moving(80, 70),
    "from_here_on": _moving(0, None),
    "from_9_before_on": _moving(9, None),
    "window_before_the_keys": _moving(4, 0, slot=-30),
    "window_behind_the_keys": _moving(4, 0, slot=60),
    "left_padding": _padded("left", 0),
    "right_padding": _padded("right", 0),
    "padding_alone": _padded("right", None),
    "nothing": _padded("all", 0),
    "documents": _bounded("causal"),
    "whole_documents": _bounded("whole"),
    "any_intervals": _bounded("any"),
    "a_share_for_each_sequence": _bounded("shares"),
    "mask_per_batch": _chosen("batch"),
    "mask_per_head": _chosen("head"),
    "mask_per_batch_and_head": _chosen("both"),
    "bias_for_all": _biased("all"),
    "bias_per_head": _biased("head"),
    "bias_in_half": _biased("both", dtype=torch.float16),
    "bias_that_hides": _biased("both", -math.inf),
    "bias_that_hides_by_a_number": _biased("head", torch.finfo(torch.float32).min),
    "bias_that_hides_by_ten_thousand": _biased("both", -1e4),
    "causal_with_mask": _combined(_moving(None, 0), _chosen("head")),
    "window_with_padding_and_bias": _combined(_moving(30, 2), _padded("left", None), _biased("head", -1e9)),
    "documents_with_padding": _combined(_bounded("causal"), _padded("left", None)),
    "documents_with_mask": _combined(_bounded("any"), _chosen("batch")),
}

BETAS: dict[str, Callable[..., Tensor]] = {
    "one": lambda batch, heads, queries, generator: torch.ones(1, 1, 1),
    "per_row": lambda batch, heads, queries, generator: (2.0 + torch.arange(queries)).log()[None, None],
    "per_head": lambda batch, heads, queries, generator: torch.linspace(0.3, 3.0, heads)[None, :, None],
    "per_batch": lambda batch, heads, queries, generator: torch.linspace(2.5, 0.4, batch)[:, None, None],
    "each": lambda batch, heads, queries, generator: 0.2 + 3 * torch.rand(batch, heads, queries, generator=generator),
    "any_sign": lambda batch, heads, queries, generator: _any_sign(
        torch.randn(batch, heads, queries, generator=generator)
    ),
    "negative": lambda batch, heads, queries, generator: -0.2 - 2 * torch.rand(1, heads, queries, generator=generator),
    "zero": lambda batch, heads, queries, generator: torch.zeros(1, 1, queries),
    "tiny": lambda batch, heads, queries, generator: torch.full((1, 1, queries), 1e-5),
    "sharp": lambda batch, heads, queries, generator: 5.0 + torch.rand(1, heads, queries, generator=generator),
}


def _any_sign(beta: Tensor) -> Tensor:
    """Random temperatures, every third of them 0."""
    return 2 * beta * (torch.arange(beta.shape[-1]) % 3 != 1)


# Dropout with the random numbers of the kernels.


@triton.jit
def _keep_kernel(
    seed_ptr, kept_ptr, queries, keys, dropout_p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_SLOT: tl.constexpr
):
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if BY_SLOT:
        kept = tl.trans(keep_by_slot(tl.load(seed_ptr), head, rows, slots, dropout_p))
    else:
        kept = keep(tl.load(seed_ptr), head, rows, tl.program_id(2) * BLOCK_N, dropout_p, BLOCK_N)
    at = kept_ptr + (head * queries + rows[:, None]) * keys + slots[None, :]
    tl.store(at, kept.to(tl.uint8), mask=(rows < queries)[:, None] & (slots < keys)[None, :])


def draws(
    seed: Tensor,
    shape: tuple[int, int, int, int],
    dropout_p: float,
    block: tuple[int, int] = (256, 256),
    by_slot: bool = False,
) -> Tensor:
    """The weights [B, H, Tq, Tk] that dropout keeps."""
    batch, heads, queries, keys = shape
    kept = torch.full(shape, 7, dtype=torch.uint8)
    grid = (batch * heads, triton.cdiv(queries, block[0]), triton.cdiv(keys, block[1]))
    _keep_kernel[grid](seed, kept, queries, keys, dropout_p, BLOCK_M=block[0], BLOCK_N=block[1], BY_SLOT=by_slot)
    return kept == 1


# The kernels, in poisoned memory.


@contextmanager
def poisoned() -> Iterator[None]:
    """Context: new memory and its surroundings hold NaN, or the least int, so that missing and stray writes show."""
    buffers: list[Tensor] = []

    def poison(x: Tensor) -> Tensor:
        if not x.numel() or not (x.is_floating_point() or x.dtype in (torch.int32, torch.int64)):
            return x
        fill = math.nan if x.is_floating_point() else torch.iinfo(x.dtype).min
        buffer = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype)
        buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(x.shape)

    def wrapped(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with (
        mock.patch.object(torch.Tensor, "new_empty", wrapped(torch.Tensor.new_empty)),
        mock.patch.object(torch, "empty_like", wrapped(torch.empty_like)),
        mock.patch.object(torch, "empty", wrapped(torch.empty)),
    ):
        yield
    assert buffers, "nothing was allocated: is memory taken in another way now?"
    for buffer in buffers:
        fresh = buffer.isnan() if buffer.is_floating_point() else buffer == torch.iinfo(buffer.dtype).min
        assert fresh[:GUARD].all(), "something was written before the first row"
        assert fresh[-GUARD:].all(), "something was written behind the last row"


def forward(x: Inputs, tile: Tile | None = TILE, *, winner: bool = False) -> Forward:
    """`flash_forward` with all statistics except the winner, which is optional."""
    options = {**x.options, "entropy": True, "winner": winner, "tile": tile}
    with poisoned():
        return flash_forward(x.q, x.k, x.v, x.beta, x.seen.visibility, **options)


def backward(x: Inputs, result: Forward, query_tile: Tile | None = TILE, key_tile: Tile | None = TILE) -> Backward:
    """`flash_backward` with all gradients."""
    with poisoned():
        return flash_backward(
            x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, result.out, result.lse, **x.options,
            dbeta=True, query_tile=query_tile, key_tile=key_tile,
        )  # fmt: skip


# Naive attention.

STATISTICS = ("lse", "max_logit", "entropy")
GRADIENTS = {
    "dq": "query",
    "dk": "key",
    "dv": "value",
    "dbeta": "beta",
    "dsinks": "sinks",
}


def written_out(x: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Output, statistics and gradients of naive attention in the given dtype."""
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v, beta = (t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v, x.beta.expand(x.q.shape[:3])))
    wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (k, v))
    table = x.seen.table.expand(*x.q.shape[:3], k.shape[2])
    scores = q @ wide_k.mT * x.scale
    if x.softcap is not None:
        scores = x.softcap * torch.tanh(scores / x.softcap)
    if x.seen.bias is not None:
        scores = scores + x.seen.bias.to(dtype)
    logits = (scores * beta[..., None]).masked_fill(~table, -math.inf)
    result = {}
    leaves = {"dq": q, "dk": k, "dv": v, "dbeta": beta}
    every = logits
    if x.sinks is not None:
        sinks = leaves["dsinks"] = x.sinks.detach().to(dtype).requires_grad_()
        every = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    some = (every > -math.inf).any(-1, keepdim=True)
    all_weights = torch.where(some, every, 0.0).softmax(-1) * some
    weights = all_weights[..., : k.shape[2]]
    left = weights if x.kept is None else weights * x.kept / (1 - x.dropout_p)
    out = left @ wide_v
    gradients = torch.autograd.grad(out, list(leaves.values()), x.gradient.to(dtype), allow_unused=True)
    result |= {name: _found(g, leaf) for (name, leaf), g in zip(leaves.items(), gradients, strict=True)}
    result["out"], result["logits"] = out.detach(), logits.detach()
    with torch.no_grad():
        result["lse"] = torch.where(some[..., 0], every.logsumexp(-1), -math.inf)
        result["max_logit"] = logits.amax(-1) if logits.shape[-1] else torch.full_like(result["lse"], -math.inf)
        result["entropy"] = torch.special.entr(all_weights.double()).sum(-1)
        if dtype == torch.float64:
            roundings = _roundings(x, result, weights, wide_k, scores)
            result |= {f"rounding_{name}": value for name, value in roundings.items()}
    return {name: value.detach() for name, value in result.items()}


def _found(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _roundings(x: Inputs, true: dict[str, Tensor], weights: Tensor, k: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The effect of unavoidable roundings on gradients, as root mean squares.

    Logits and lse are fp32, so the weights and the differences dP − Δ of a row have an error of one rounding of its
    largest logit. Δ = ⟨dO, O⟩ uses an output rounded to its dtype. torch's fused kernels have both errors.
    """
    heads, group = weights.shape[1], weights.shape[1] // x.k.shape[1]
    v, gradient, out = x.v.double().repeat_interleave(group, 1), x.gradient.double(), true["out"]
    beta = x.beta.double().expand(x.q.shape[:3])
    largest = [true[name].masked_fill(true[name].isinf(), 0.0).abs() for name in ("lse", "max_logit")]
    logit = FP32_ROUNDING * torch.maximum(*largest).clamp(min=1.0)[..., None]
    dp = (gradient @ v.mT).abs() / (1 - x.dropout_p)
    delta = (gradient * out).abs().sum(-1, keepdim=True)
    of_delta = torch.finfo(x.q.dtype).eps * (gradient * out).norm(dim=-1, keepdim=True)
    terms = weights * (dp + delta) * logit
    by_beta = terms * beta[..., None] * x.scale
    mean_key, mean_score = weights @ k, (weights * scores).sum(-1)

    def gathered(per_head: Tensor) -> Tensor:
        return per_head.unflatten(1, (-1, group)).sum(2)

    dq = (by_beta.square() @ k.square()) + (of_delta * beta[..., None] * x.scale * mean_key).square()
    from_delta = (weights * of_delta * beta[..., None] * x.scale).square()
    return {
        "dq": dq.sqrt(),
        "dk": gathered((by_beta.square() + from_delta).mT @ x.q.double().square()).sqrt(),
        "dv": gathered((weights * logit / (1 - x.dropout_p)).square().mT @ gradient.square()).sqrt(),
        "dbeta": ((terms * scores).square().sum(-1) + (of_delta[..., 0] * mean_score).square()).sqrt(),
        "dsinks": (delta * logit + of_delta).square().sum((0, 2, 3)).sqrt().view(heads),
    }


def torch_errors(x: Inputs, true: dict[str, Tensor]) -> dict[str, float]:
    """Errors of torch in this dtype on equally sharp logits, against fp64 on the same numbers."""
    own = written_out(x, x.q.dtype)
    errors = {name: size(own[name].double() - true[name]) for name in ("out", *GRADIENTS) if name in own}
    if x.softcap is None and x.sinks is None and x.kept is None and x.k.shape[2]:
        errors |= _sdpa_errors(x)
    return errors


def _sdpa_errors(x: Inputs) -> dict[str, float]:
    """Errors of torch's SDPA with the rounded β·q as query; rows without visible keys see everything here."""
    beta = x.beta.double().expand(x.q.shape[:3])
    sharp = (x.q.double() * beta[..., None]).to(x.q.dtype)
    table = x.seen.table | ~x.seen.table.any(-1, keepdim=True)
    mask = table
    if x.seen.bias is not None:
        shape = (*x.q.shape[:3], x.k.shape[2])
        mask = (beta[..., None] * x.seen.bias).to(x.q.dtype).masked_fill(~table.expand(shape), -math.inf)

    def attend(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (sharp, x.k, x.v)]
        wide = mask.to(dtype) if mask.is_floating_point() else mask
        out = F.scaled_dot_product_attention(*leaves, attn_mask=wide, scale=x.scale, enable_gqa=True)
        dq, dk, dv = (g.double() for g in torch.autograd.grad(out, leaves, x.gradient.to(dtype)))
        dbeta = (x.q.double() * dq).sum(-1)
        result = {"out": out.detach().double(), "dq": dq * beta[..., None], "dk": dk, "dv": dv}
        return result if x.seen.bias is not None else result | {"dbeta": dbeta}

    own, true = attend(x.q.dtype), attend(torch.float64)
    return {name: size(own[name] - true[name]) for name in own}


def size(x: Tensor) -> float:
    """The root mean square."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def assert_as_good_as_torch(x: Inputs, got: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    """Each error is at most twice that of torch, plus one rounding of the result and of its inputs."""
    own = torch_errors(x, true)
    for name, value in got.items():
        assert value.shape == true[name].shape, f"{name} has the shape {tuple(value.shape)}"
        assert value.isfinite().all(), f"{name} is not finite in {(~value.isfinite()).sum()} places"
        error = size(value.double() - true[name])
        precision = torch.finfo(value.dtype)
        budget = 2 * own[name] + precision.eps * (size(true[name]) + precision.smallest_normal)
        if f"rounding_{name}" in true:
            budget += size(true[f"rounding_{name}"])
        assert error <= budget, (
            f"{name}: error {error:.2e} is over the budget {budget:.2e} (torch's own {own[name]:.2e})"
        )


def assert_statistics(got: Forward, true: dict[str, Tensor]) -> None:
    """Statistics are within 1e-5 and a few roundings of the largest logit; −∞ for rows without visible keys."""
    largest = true["max_logit"].masked_fill(true["max_logit"].isinf(), 0.0).abs().max() if got.lse.numel() else 0.0
    for name in STATISTICS:
        value, expected = getattr(got, name).double(), true[name]
        assert value.shape == expected.shape, f"{name} has the shape {tuple(value.shape)}"
        assert torch.equal(value == -math.inf, expected == -math.inf), f"{name} is not −∞ where nothing is seen"
        error = (value - expected).masked_fill(expected == -math.inf, 0.0).abs()
        worst = error.max().item() if error.numel() else 0.0
        budget = NATS + 16 * FP32_ROUNDING * float(largest)
        assert worst <= budget, f"{name}: off by {worst:.2e} where {budget:.2e} is allowed"


def assert_forward(x: Inputs, got: Forward) -> None:
    """Output and statistics match naive attention in fp64."""
    true = written_out(x)
    assert_statistics(got, true)
    assert_as_good_as_torch(x, {"out": got.out}, true)


def assert_backward(x: Inputs, query_tile: Tile | None = TILE, key_tile: Tile | None = TILE) -> None:
    """Gradients match naive attention in fp64, which also provides the output and lse of the forward pass."""
    true = written_out(x)
    got = gradients(backward(x, exact_forward(x, true), query_tile, key_tile))
    assert ("dsinks" in got) == (x.sinks is not None)
    assert_as_good_as_torch(x, got, true)


def exact_forward(x: Inputs, true: dict[str, Tensor]) -> Forward:
    """The result of a forward pass that rounds only its results."""
    out, lse = guarded(true["out"].to(x.q.dtype)), guarded(true["lse"].float())
    return Forward(out, lse, true["max_logit"].float(), None)


def gradients(got: Backward) -> dict[str, Tensor]:
    """All results of a backward pass, by the names used here."""
    results = {name: getattr(got, field) for name, field in GRADIENTS.items()}
    return {name: value for name, value in results.items() if value is not None}


def rows_of(got: Forward) -> dict[str, Tensor]:
    """All results of a forward pass."""
    return {name: value for name, value in got._asdict().items() if value is not None}
