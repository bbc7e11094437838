"""Expected brackets of Λ and gap counts.

Scores that are multiples of a small power of two are exact in fp32, and so are the expected results: Λ by sorting in
fp64, and gaps counted one by one. Other scores have an uncertainty, and the expected result is an interval.
"""

from __future__ import annotations

import math

import torch
from flash_cases import Case, Inputs, guarded, inputs_of
from torch import Tensor

from attnscale.statistics.gaps import count_gaps
from attnscale_kernels.gaps.bins import WIDTH
from attnscale_kernels.gaps.launch import GapBracket

RATIO = 1 + WIDTH
THRESHOLDS = (-1.0, 0.0, 0.25, 1.0, 3.0, math.inf)


def bounds(scores: Tensor, visible: Tensor, doubt: float = 0.0) -> tuple[Tensor, Tensor]:
    """The possible values of Λ, by sorting in fp64, if each gap is off by at most `doubt`."""
    falling = scores.double().masked_fill(~visible, -math.inf).sort(-1, descending=True).values
    gaps = (falling[..., :1] - falling[..., 1:]).nan_to_num(math.inf, math.inf)
    ln_rank = torch.arange(2, scores.shape[-1] + 1).double().log().expand_as(gaps)
    if not gaps.shape[-1]:
        return 2 * (scores.new_zeros(scores.shape[:-1]),)
    least, most = (ln_rank / (gaps + side).clamp(min=0) for side in (doubt, -doubt))
    return least.amax(-1), most.amax(-1)


def assert_bracket(got: GapBracket, scores: Tensor, visible: Tensor, doubt: float = 0.0) -> None:
    """Λ is inside, the bracket is as narrow as promised, and the best score and its gap are right."""
    least, most = bounds(scores, visible, doubt)
    for x in got:
        assert x.dtype == torch.float32
        assert not x.isnan().any()
    assert (got.lower <= most).all()
    assert (got.upper >= least).all()
    closed = got.upper < math.inf
    assert (got.upper[closed] <= RATIO * got.lower[closed]).all()
    assert (got.lower <= got.upper).all()
    two = visible.sum(-1) >= 2
    assert (got.upper[~two.expand_as(got.upper)] == 0).all()
    assert (got.lower[two.expand_as(got.upper)] > 0).all()
    best = scores.double().masked_fill(~visible, -math.inf).sort(-1, descending=True).values
    torch.testing.assert_close(got.top.double(), best[..., 0], rtol=1e-7, atol=doubt)
    if best.shape[-1] > 1:
        gap = (best[..., 0] - best[..., 1]).nan_to_num(math.inf, math.inf)
        torch.testing.assert_close(got.second_gap.double(), gap, rtol=1e-7, atol=doubt)
        if not doubt:
            assert torch.equal(got.lower == math.inf, gap == 0)


def assert_counts(
    got: Tensor, scores: Tensor, visible: Tensor, doubt: float = 0.0, thresholds: tuple[float, ...] = THRESHOLDS
) -> None:
    """Each count matches its threshold, up to the uncertainty of the scores."""
    scores = scores.double().masked_fill(~visible, -math.inf)
    assert got.dtype == torch.int32
    least, most = (count_gaps(scores, tuple(t + side for t in thresholds)) for side in (-doubt, doubt))
    assert (got >= least).all()
    assert (got <= most).all()


def dyadic(case: Case) -> Inputs:
    """Inputs in multiples of 1/64: products and their sums are exact in fp32, also from fp16."""
    x = inputs_of(case)
    for name in ("q", "k"):
        setattr(x, name, guarded((getattr(x, name) * 64).round() / 64))
    return x


def written_out(x: Inputs) -> tuple[Tensor, Tensor, float]:
    """Raw scores [B, H, Tq, Tk] in fp64, their visibility, and the possible error of the kernel's gaps."""
    group = x.q.shape[1] // x.k.shape[1]
    scores = x.scale * x.q.double() @ x.k.double().repeat_interleave(group, 1).mT
    doubt = 0.0
    if x.softcap is not None:
        scores = x.softcap * torch.tanh(scores / x.softcap)
        doubt += 4e-6
    if x.seen.bias is not None:
        scores = scores + x.seen.bias
        doubt += 2e-6
    return scores, x.seen.table.expand_as(scores), doubt
