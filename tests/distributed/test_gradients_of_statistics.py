"""Statistics with gradients of a sequence spread over two processes: the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_two_ranks
from torch import distributed

import attnscale
from attnscale import StatsRequest
from attnscale.distributed import context_parallel_attention
from attnscale.statistics.request import DIFFERENTIABLE

HEADS, TOKENS, DIM = 4, 24, 8
METHODS = ("gather", "ulysses", "ring")
REQUESTS = {
    "all": StatsRequest(differentiable=True),
    "lse": StatsRequest(w_max=False, entropy=False, max_logit=False, differentiable=True),
    "beside gaps": StatsRequest(gap_thresholds=(0.5,), accumulation="bracket", first_share=2, differentiable=True),
    "sampled": StatsRequest(rows=12, differentiable=True),  # all rows of a process
    "fewer": StatsRequest(rows=5, differentiable=True),
}


def gradients(attention: Any, request: StatsRequest, own: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients of a loss of output and statistics of some tokens of a fixed sequence, and the statistics."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, HEADS, TOKENS, DIM), (2, 2, TOKENS, DIM), (2, 2, TOKENS, DIM), (2, HEADS, TOKENS, DIM)
    *inputs, weight = (torch.randn(shape, dtype=torch.float64, generator=generator)[:, :, own] for shape in shapes)
    weights = torch.randn(4, 2, HEADS, TOKENS, dtype=torch.float64, generator=generator)[..., own]
    inputs = [x.requires_grad_() for x in inputs]
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    law = attnscale.build_policy("ssmax", num_heads=HEADS).double()
    rules = {"is_causal": True, "softcap": 2.0, "sinks": sinks, "policy": law, "enable_gqa": True}
    out, stats = attention(*inputs, request=request, **rules, **options)
    loss = (out * weight).sum()
    for name, of_rows in zip(DIFFERENTIABLE, weights, strict=True):
        value = getattr(stats, name)
        if value is not None:
            loss = loss + (value * (of_rows if stats.rows is None else of_rows[..., stats.rows])).sum()
    loss.backward()
    unasked = [x for x in (stats.criticality, stats.first_share) if x is not None]
    assert not any(x.requires_grad for x in unasked)
    found = {name: x.grad for name, x in zip("qkv", inputs, strict=True)}
    found |= {name: x.detach() for name in DIFFERENTIABLE if (x := getattr(stats, name)) is not None}
    return found | {"sinks": sinks.grad, "beta": next(law.parameters()).grad}


def everywhere(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    own = torch.arange(TOKENS).view(2, 2, -1)[:, rank].flatten()  # a part of the first and of the second half
    found = {}
    for method in METHODS:
        for name, request in REQUESTS.items():
            part = gradients(
                context_parallel_attention, request, own, mesh=mesh, positions=own, method=method, backend="blockwise"
            )
            for summed in ("sinks", "beta"):
                distributed.all_reduce(part[summed])
            found[method, name] = part
    found["rows"] = own
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    return on_two_ranks(everywhere, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "fewer"])
def test_gradients_equal_those_of_one_process(two, method, name):
    request = StatsRequest(**{key: getattr(REQUESTS[name], key) for key in DIFFERENTIABLE}, differentiable=True)
    alone = gradients(attnscale.attention_with_stats, request, torch.arange(TOKENS), backend="reference")
    for rank in two:
        for key, value in rank[method, name].items():
            expected = alone[key] if key in ("sinks", "beta") else alone[key][:, :, rank["rows"]]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_sampled_rows_give_the_same_gradients_with_every_method(two):
    for rank in two:
        for key, value in rank["gather", "fewer"].items():
            for method in METHODS[1:]:
                torch.testing.assert_close(rank[method, "fewer"][key], value, rtol=0, atol=1e-12)
