"""Calls of every kernel family: inputs, launches, and the comparison of their results with fp64.

Oracles and budgets are those of the interpreter tests (flash_cases.py, softmax_cases.py, gap_cases.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from flash_cases import (
    FP32_ROUNDING,
    NATS,
    Case,
    Inputs,
    assert_as_good_as_torch,
    assert_forward,
    exact_forward,
    gradients,
    guarded,
    inputs_of,
    written_out,
)
from gap_cases import THRESHOLDS as GAPS
from gap_cases import assert_bracket, assert_counts, dyadic
from gap_cases import written_out as gap_scores
from softmax_cases import THRESHOLDS, counts_by_torch, normal, random_mask
from softmax_cases import assert_as_good_as_torch as assert_softmax
from torch import Tensor

from attnscale_kernels.decode.launch import decode_launches
from attnscale_kernels.flash import mask as masks
from attnscale_kernels.flash.launch import backward_launches, forward_launches
from attnscale_kernels.gaps.launch import GapBracket, bracket_launches, count_launches
from attnscale_kernels.launch import Forward, Launch
from attnscale_kernels.softmax import launch as softmax


class Call(NamedTuple):
    """Launches, and a function that compares their outputs with the expected results."""

    launches: tuple[Launch, ...]
    check: Callable[[], None]  # raises AssertionError
    scores: int = 0  # products q·k of the call, visible or not
    finite: bool = True  # whether q, k and v are


def forward(case: Case, *, entropy: bool = True, winner: bool = False, **options: Any) -> Call:
    """The forward pass, behind the classification of its mask if there is any."""
    x, true = _prepared(case, **options)
    with _listed(options):
        launches, result = forward_launches(
            x.q, x.k, x.v, x.beta, x.seen.visibility, **x.options, entropy=entropy, winner=winner
        )
    return Call(launches, lambda: _check_forward(x, result, true), _scores(x), _is_finite(x))


def decode(case: Case, splits: int, *, winner: bool = False, entropy: bool = True, **options: Any) -> Call:
    """The forward pass of few queries; the merge follows if there are several splits."""
    x, true = _prepared(case, **options)
    given = {"scale": x.scale, "softcap": x.softcap, "sinks": x.sinks}
    launches, result = decode_launches(
        x.q, x.k, x.v, x.beta, x.seen.visibility, **given, entropy=entropy, winner=winner, splits=splits
    )
    return Call(launches, lambda: _check_forward(x, result, true), _scores(x), _is_finite(x))


def backward(case: Case, *, dbeta: bool = True, kernels: tuple[int, ...] = (), **options: Any) -> Call:
    """The backward pass from an exact forward pass."""
    x, true = _prepared(case, **options)
    before = exact_forward(x, true)
    given = {"scale": x.scale, "softcap": x.softcap, "dropout_p": x.dropout_p, "seed": x.seed}
    with _listed(options):
        launches, result = backward_launches(
            x.gradient, x.q, x.k, x.v, x.beta, x.seen.visibility, before.out, before.lse, **given, dbeta=dbeta
        )

    def check() -> None:
        assert_as_good_as_torch(_clean(x), gradients(result), true)

    return Call(launches, check, _scores(x), _is_finite(x))


def gaps(case: Case, *, thresholds: tuple[float, ...] = GAPS, broken: int | None = None) -> Call:
    """The bracket of Λ and the counts at thresholds, on scores that are exact in fp32.

    The key `broken` is NaN. The rows of a causal rule that see it, the last ones, are NaN and count nothing.
    """
    x = dyadic(case)
    scores, visible, doubt = gap_scores(x)
    rows = visible.shape[2]
    if broken is not None:
        x.k[:, :, broken] = math.nan
        rows = int((~visible[..., broken]).sum(-1).amax())
    given = {"scale": x.scale, "softcap": x.softcap}
    one, bracket = bracket_launches(x.q, x.k, x.seen.visibility, **given)
    other, counts = count_launches(x.q, x.k, x.seen.visibility, thresholds, **given)
    finite = scores[:, :, :rows], visible[:, :, :rows], doubt

    def check() -> None:
        assert_bracket(GapBracket(*(number[:, :, :rows] for number in bracket)), *finite)
        assert_counts(counts[:, :, :rows], *finite, thresholds)
        assert all(number[:, :, rows:].isnan().all() for number in bracket), "a row with NaN has a bracket"
        assert not counts[:, :, rows:].any(), "a row with NaN has counts"

    return Call((*one, *other), check, 2 * _scores(x))


def row_softmax(dtype: torch.dtype, keys: int, *extras: str, rows: tuple[int, int, int] = (2, 2, 5)) -> Call:
    """The row softmax and its backward pass. `extras`: mask, bias, counts, transposed."""
    scores = normal(*rows, keys, dtype=dtype)
    if "transposed" in extras:  # another order of the leading axes in memory
        scores = scores.transpose(1, 2).contiguous().transpose(1, 2)
    beta = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(1))
    mask = random_mask(rows[0], 1, rows[2], keys) if "mask" in extras else None
    bias = normal(1, *rows[1:], keys, dtype=dtype, seed=3) if "bias" in extras else None
    upstream = normal(*rows, keys, dtype=dtype, seed=4)
    thresholds = torch.tensor(THRESHOLDS) if "counts" in extras else None
    launches, found = softmax.forward_launches(scores, beta, mask=mask, bias=bias, thresholds=thresholds)
    behind, gradient = softmax.backward_launches(upstream, found.weights, beta, scores=scores, bias=bias)

    def check() -> None:
        names = ("weights", "lse", "max_logit", "w_max", "entropy")
        got = {name: getattr(found, name) for name in names}
        assert_softmax(got, scores, beta, mask, bias)
        assert gradient.beta is not None
        assert_softmax({"dscores": gradient.scores, "dbeta": gradient.beta}, scores, beta, mask, bias, upstream)
        _check_centre(gradient.beta, found.weights, upstream, scores, bias)
        if found.gap_counts is not None:
            assert torch.equal(found.gap_counts, counts_by_torch(scores, mask, bias, THRESHOLDS)), "gap counts"

    return Call((*launches, *behind), check, scores.numel())


def _check_centre(dbeta: Tensor, weights: Tensor, upstream: Tensor, scores: Tensor, bias: Tensor | None) -> None:
    """dβ = Σ dℓ·(s − Σ w·s) of the stored weights, whose sum is not exactly 1: another centre gives another number."""
    w, dw, raw = weights.double(), upstream.double(), scores.double() + (0.0 if bias is None else bias.double())
    terms = w * (dw - (w * dw).sum(-1, keepdim=True)) * (raw - (w * raw).sum(-1, keepdim=True))
    error = (dbeta.double() - terms.sum(-1)).abs()
    assert (error <= 16 * FP32_ROUNDING * terms.abs().sum(-1)).all(), f"dβ is off by up to {error.max():.2e}"


def _prepared(
    case: Case, *, nan: bool = False, columns: slice = slice(None), inside: bool = False, listed: bool = False
) -> tuple[Inputs, Any]:
    """Inputs and results in fp64.

    `nan` plants NaN in columns of the keys and values that no row sees; `inside` puts the heads inside of the rows.
    """
    x = inputs_of(replace(case, dropout_p=0.0))
    if case.dropout_p:
        x.dropout_p, x.seed = case.dropout_p, torch.tensor(0x1234_5678_9ABC + case.seed)
        x.kept = kept(int(x.seed), (*x.q.shape[:3], x.k.shape[2]), case.dropout_p)
    true = written_out(x)
    if nan:
        unseen = ~x.seen.table.expand(x.q.shape[0], x.q.shape[1], -1, -1).any((1, 2))  # [B, Tk]
        assert unseen.any(), "every key is seen"
        x.clean = replace(x)  # type: ignore[attr-defined]
        planted = torch.zeros(x.k.shape[-1], dtype=torch.bool)
        planted[columns] = True
        x.k, x.v = (guarded(t.masked_fill(unseen[:, None, :, None] & planted, math.nan)) for t in (x.k, x.v))
    if inside:
        x.q, x.k, x.v, x.gradient = (guarded(t.transpose(1, 2)).transpose(1, 2) for t in (x.q, x.k, x.v, x.gradient))
    return x, true


def _clean(x: Inputs) -> Inputs:
    """The inputs without planted NaN."""
    return getattr(x, "clean", x)


def _listed(options: dict[str, Any]) -> Any:
    """Context: masks of small calls are classified too."""
    return mock.patch.object(masks, "LEAST_SCORES", 0 if options.get("listed") else masks.LEAST_SCORES)


def _check_forward(x: Inputs, result: Forward, true: dict[str, Tensor]) -> None:
    if result.winner is not None:
        assert_winner(result.winner, true["logits"])
    if result.entropy is None:  # not requested
        result = result._replace(entropy=true["entropy"].float())
    assert_forward(_clean(x), result)


def assert_winner(winner: Tensor, logits: Tensor) -> None:
    """The winner's logit is the largest, up to rounding; −1 in rows without a visible key."""
    top = logits.amax(-1)
    empty = top == -math.inf
    assert torch.equal(winner == -1, empty), "winner is not −1 exactly where nothing is seen"
    own = logits.gather(-1, winner.clamp(min=0)[..., None])[..., 0]
    doubt = NATS + 16 * FP32_ROUNDING * top.masked_fill(empty, 0.0).abs().max()
    assert ((top - own).masked_fill(empty, 0.0) <= doubt).all(), "the winner's logit is not the largest"


def _is_finite(x: Inputs) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in (x.q, x.k, x.v))


def _scores(x: Inputs) -> int:
    return int(math.prod(x.q.shape[:3])) * x.k.shape[2]


def kept(seed: int, shape: tuple[int, int, int, int], dropout_p: float) -> Tensor:
    """The weights [B, H, Tq, Tk] that dropout keeps: Philox 4×32 with 7 rounds at (slot // 4, row, head, 0)."""
    batch, heads, queries, keys = shape
    fours = -(-keys // 4)
    head, row, four = (
        x.astype(np.uint64) for x in np.meshgrid(*map(np.arange, (batch * heads, queries, fours)), indexing="ij")
    )
    low = np.uint64(0xFFFF_FFFF)
    counter = [four, row, head, np.zeros_like(four)]
    key = [np.uint64(seed & 0xFFFF_FFFF), np.uint64(seed >> 32)]
    for _ in range(7):
        first, second = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> np.uint64(32)) ^ counter[1] ^ key[0],
            second & low,
            (first >> np.uint64(32)) ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    draw = np.stack(counter, -1).reshape(batch, heads, queries, 4 * fours)[..., :keys]
    return torch.from_numpy((draw >> np.uint64(8)) / 2.0**24 >= np.float32(dropout_p))
