"""Contract 11: output, statistics and gradients of a row do not depend on other rows or sequences of the call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from corrected_interpreter import corrected
from oracle import tensors
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnscale import StatsRequest, attention_with_stats, build_policy, scaled_dot_product_attention
from attnscale.statistics.rows import tiles
from attnscale_kernels import why_unavailable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on NaN, in Triton's interpreter

SHAPE = (6, 4, 40, 16)
MINE, ROW = 2, 17  # the sequence and the query that are looked at

BACKENDS = ["sdpa", "blockwise", "reference"]
if why_unavailable(torch.device("cpu")) is None:  # triton exists on Linux only
    BACKENDS.append("triton")
POLICIES = [
    {"name": "log"},
    {"name": "log_squared"},
    {"name": "ssmax", "num_heads": 4},
    {"name": "gap_adaptive"},
    {"name": "entropy_adaptive"},
]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["name"])

Results = tuple[Tensor, Tensor, Tensor, Tensor]


def run(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Results:
    """Output and gradients, for an upstream gradient that is the same for the same rows."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with corrected():
        out = attend(*inputs)
        upstream = tensors(q.shape[1:], (1,), out.dtype, seed=3)[0].expand_as(out)
        return out.detach(), *torch.autograd.grad(out, inputs, upstream)


def with_wild_neighbours(x: Tensor) -> Tensor:
    """The same sequence among others that are a thousand times as large, nearly tied, zero, or not finite."""
    wild = x.clone()
    wild[0] *= 1000
    wild[1] = wild[1, :, :1] * 30
    wild[3] = 0
    wild[4] = torch.nan
    wild[5] = torch.inf
    return wild


@pytest.mark.parametrize(
    ("backend", "compiled"),
    # A graph holds the kernels as opaque operators, which run as they do outside.
    [(name, False) for name in BACKENDS] + [(name, True) for name in BACKENDS if name != "triton"],
)
@every_dtype
@every_policy
def test_a_sequence_in_a_batch_gives_the_bits_it_gives_alone_or_beside_others(policy, dtype, backend, compiled):
    attend = partial(scaled_dot_product_attention, is_causal=True, policy=build_policy(policy), backend=backend)
    if compiled:
        torch._dynamo.reset()  # policies of other tests count as recompilations
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = tensors(SHAPE, SHAPE, dtype)
    among_tame, among_wild = run(attend, q, k, v), run(attend, *map(with_wild_neighbours, (q, k, v)))
    alone = run(attend, *(x[MINE : MINE + 1] for x in (q, k, v)))
    for tame, wild, single in zip(among_tame, among_wild, alone, strict=True):
        assert torch.equal(tame[MINE], wild[MINE])
        assert torch.equal(tame[MINE], single[0])


@every_backend
@every_dtype
@every_policy
def test_a_row_gives_the_same_bits_whatever_the_other_queries_are(policy, dtype, backend):
    attend = partial(scaled_dot_product_attention, is_causal=True, policy=build_policy(policy), backend=backend)
    q, k, v = tensors(SHAPE, SHAPE, dtype)
    others = q.clone()
    others[:, :, : ROW - 5] *= 1000
    others[:, :, ROW + 1 :] *= 300
    for before, after in zip(run(attend, q, k, v)[:2], run(attend, others, k, v)[:2], strict=True):
        assert torch.equal(before[:, :, ROW], after[:, :, ROW])


@pytest.mark.parametrize("backend", BACKENDS[1:])
@every_dtype
@every_policy
def test_statistics_of_a_sequence_do_not_depend_on_the_others(policy, dtype, backend):
    request = StatsRequest(gap_thresholds=(0.5, 2.0), accumulation="bracket")
    measure = partial(
        attention_with_stats, is_causal=True, policy=build_policy(policy), request=request, backend=backend
    )
    q, k, v = tensors(SHAPE, SHAPE, dtype)
    with corrected():
        tame, wild = measure(q, k, v).stats, measure(*map(with_wild_neighbours, (q, k, v))).stats
    for name in ("lse", "max_logit", "w_max", "entropy", "gap_counts"):
        assert torch.equal(getattr(tame, name)[MINE], getattr(wild, name)[MINE]), name
    for a, b in zip(tame.accumulation, wild.accumulation, strict=True):
        assert torch.equal(a[MINE], b[MINE])


REQUESTS = {
    "softmax": StatsRequest(winner=True, first_share=3),
    "gaps": StatsRequest(gap_thresholds=(0.5, 2.0), accumulation="bracket", winner=True),
    "sampled": StatsRequest(accumulation="bracket", rows=20),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("rule", ["causal", "documents", "padding"])
@pytest.mark.parametrize("scores", [100, 2000, 2**21])
def test_a_sequence_is_cut_into_the_same_tiles_whatever_the_batch(request_name, rule, scores, monkeypatch):
    for name in ("SCORES", "SAMPLED_SCORES"):
        monkeypatch.setattr(tiles, name, scores)
    length, batch = 150, 5
    q, k, v = tensors((batch, 4, length, 8), (batch, 2, length, 8), torch.float32)
    generator = torch.Generator().manual_seed(4)
    rules = {
        "causal": {},
        "documents": {"document_ids": torch.randint(40, (batch, length), generator=generator).sort(-1).values},
        "padding": {"key_padding": torch.arange(length) < torch.tensor([[0], [3], [17], [60], [2]])},
    }[rule]
    whole, alone = (
        run_with_stats(q[rows], k[rows], v[rows], REQUESTS[request_name], {name: x[rows] for name, x in rules.items()})
        for rows in (slice(0, batch), slice(MINE, MINE + 1))
    )
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[MINE : MINE + 1].nan_to_num(7.0), other.nan_to_num(7.0))


def run_with_stats(q: Tensor, k: Tensor, v: Tensor, request: StatsRequest, rules: dict[str, Tensor]) -> list[Tensor]:
    """Output, gradients and every statistic of the blockwise backend."""
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    given = {"is_causal": True, "enable_gqa": True, "policy": "log", "backend": "blockwise", **rules}
    out, stats = attention_with_stats(*inputs, request=request, **given)
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    found = tree_leaves(stats._replace(visible=None, rows=None, places=None))
    return [out.detach(), *gradients, *(x for x in found if isinstance(x, Tensor))]
