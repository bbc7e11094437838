"""What is measured of sampled rows, for every rule a call can have, held against fp64 on the whole matrix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnscale import StatsRequest, row_statistics
from attnscale.attention import bind
from attnscale.backends.dispatch import prepare
from attnscale.diagnostics.listener import TensorIdentity
from attnscale.statistics.gaps import BRACKET_WIDTH, HIDDEN
from attnscale.statistics.rows import tiles
from attnscale.statistics.rows.quantities import (
    BACKWARD,
    COMPARED,
    FORWARD,
    THRESHOLDS,
    backward_quantities,
    compared_quantities,
    forward_quantities,
    gap_name,
    measure_quantities,
    score_gradients,
)

LENGTH, HEADS = 33, 4
MIDDLE = math.sqrt(1 + BRACKET_WIDTH) - 1  # how far the middle of a bracket may be from Λ
SEEN = torch.rand(2, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.6
RULES = {
    "causal": {"is_causal": True},
    "everything": {},
    "window": {"is_causal": True, "window": 7},
    "padding": {"is_causal": True, "key_padding": torch.arange(LENGTH) % 5 == 2},
    "documents": {"is_causal": True, "document_ids": torch.arange(LENGTH) // 12},
    "own documents": {"is_causal": True, "document_ids": torch.arange(LENGTH) // torch.tensor([[12], [7]])},
    "mask": {"attn_mask": SEEN},
    "bias": {"attn_mask": torch.where(SEEN, torch.linspace(-2, 2, LENGTH), -math.inf)},
    "softcap": {"is_causal": True, "softcap": 0.8},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
}


def call_of(rules: dict, dtype: torch.dtype = torch.float32, kv_heads: int = HEADS):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, HEADS, LENGTH, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, kv_heads, LENGTH, 8, generator=generator).to(dtype) for _ in range(2))
    _, call, backend, policy = bind(q, k, v, enable_gqa=kv_heads != HEADS, **{"policy": "log", **rules})
    call = prepare(call, policy, backend).call
    return call, torch.randn(2, HEADS, LENGTH, 8, generator=generator)


def truth(call, upstream):
    """Every quantity but Λ and what comes of it, from the whole matrix in fp64, [B, H, T]."""
    key, value = (x.double().repeat_interleave(call.group, 1) for x in (call.key, call.value))
    scores = call.query.double() @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.double().clamp(min=HIDDEN)
    seen = call.context.dense()
    seen = torch.ones((), dtype=torch.bool) if seen is None else seen
    scores, seen = scores.masked_fill(~seen, 0.0), seen.expand(scores.shape)
    beta = call.row_beta().double()
    logits = (scores * beta[..., None]).masked_fill(~seen, -math.inf)
    sinks = torch.full(scores.shape[1:2], -math.inf) if call.sinks is None else call.sinks
    outcomes = torch.cat([logits, sinks.double()[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    chances = outcomes.softmax(-1).nan_to_num()
    weights = chances[..., :-1]
    gaps = scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True) - scores
    pull = (upstream.double() @ value.nan_to_num().mT).masked_fill(~seen, 0.0)
    dlogits = weights * (pull - (weights * pull).sum(-1, keepdim=True))
    number = seen.sum(-1)
    mean = scores.sum(-1) / number
    deviation = ((scores - mean[..., None]).square().masked_fill(~seen, 0.0).sum(-1) / number).sqrt()
    best = scores.masked_fill(~seen, -math.inf).amax(-1)
    found = {
        "w_max": weights.amax(-1),
        "entropy": torch.special.entr(chances).sum(-1),
        "visible": number.double(),
        "beta": beta,
        "relative_entropy": torch.where(number > 1, torch.special.entr(chances).sum(-1) / number.log(), math.nan),
        "max_logit": logits.amax(-1),
        "prominence": torch.where(number > 2, (best - mean) / (deviation * (2 * number.log()).sqrt()), math.nan),
        "score_gradient": dlogits.norm(dim=-1) * beta.abs(),
        "beta_gradient": (dlogits * scores).sum(-1),
    }
    found |= {gap_name(t): ((gaps <= t) & seen).sum(-1).double() for t in THRESHOLDS}
    return {name: torch.where(number > 0, x, math.nan) for name, x in found.items()}


def measured(call, upstream):
    measures, beta = measure_quantities(call), call.row_beta()
    forward = forward_quantities(measures, beta)
    backward = backward_quantities(measures, beta, score_gradients(call, upstream, measures))
    for found in (forward, backward):
        compared = compared_quantities(measures)
        torch.testing.assert_close(compared, found[: len(COMPARED)], equal_nan=True, rtol=0.0, atol=0.0)
    return dict(zip(FORWARD, forward, strict=True)) | dict(zip(BACKWARD, backward, strict=True))


def assert_measured(call, upstream, rtol: float = 2e-5):
    expected = truth(call, upstream)
    found = measured(call, upstream)
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name].double(), x, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: n + m
        )
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_are_measured_as_fp64_has_them(rule, kv_heads):
    assert_measured(*call_of(RULES[rule], kv_heads=kv_heads))


@pytest.mark.parametrize("beta", [-1.5, 0.0])
def test_a_temperature_that_was_learned_may_have_any_sign(beta):
    call, upstream = call_of(RULES["causal"])
    assert_measured(replace(call, beta=beta), upstream)


@pytest.mark.parametrize("numbers", [24, 100, 300])
@pytest.mark.parametrize("rule", ["window", "padding", "mask"])
def test_blocks_of_any_size_give_the_same(rule, numbers, monkeypatch):
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", numbers)
    monkeypatch.setattr(tiles, "LEAST_ROWS", 5)
    call, upstream = call_of(RULES[rule])
    assert_measured(replace(call, beta=-0.5), upstream)
    assert_measured(*call_of(RULES[rule], kv_heads=2))
    assert_measured(*call_of(RULES[rule], torch.bfloat16), rtol=2e-4)  # as many widened keys as a block has numbers


@pytest.mark.parametrize("rule", ["window", "padding", "mask"])
def test_blocks_of_a_single_row_give_the_same(rule, monkeypatch):
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", 1)
    rows = torch.tensor([0, 20, LENGTH - 1])
    call, upstream = call_of(RULES[rule], kv_heads=2)
    assert_measured(call.select(rows), upstream[:, :, rows])


@pytest.mark.parametrize("numbers", [24, 300, 2**18])
@pytest.mark.parametrize("rule", RULES)
def test_sequences_of_a_batch_are_measured_as_each_alone(rule, numbers, monkeypatch):
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", numbers)
    call, upstream = call_of(RULES[rule], kv_heads=2)
    together = measured(call, upstream)
    for index in range(2):
        one = slice(index, index + 1)

        def part(x, one=one):
            return x[one] if isinstance(x, torch.Tensor) and x.shape[0] == 2 else x

        rules = {name: part(getattr(call.context, name)) for name in ("slot", "first", "last", "padding", "mask")}
        tensors = {name: part(getattr(call, name)) for name in ("query", "key", "value", "beta")}
        alone = measured(replace(call, context=replace(call.context, **rules), **tensors), upstream[one])
        for name, x in alone.items():
            # A key at the edge of a bin is on one side or the other by a rounding, which the bracket allows for.
            rtol = MIDDLE if name in ("accumulation", "criticality") else 1e-5
            torch.testing.assert_close(
                together[name][one], x, equal_nan=True, rtol=rtol, atol=1e-5, msg=lambda m, n=name: n + m
            )


def test_accumulation_lies_within_its_bracket_of_the_exact_one():
    call, upstream = call_of(RULES["causal"])
    scores = call.query.double() @ call.key.double().mT * call.scale
    exact = row_statistics(scores, 1.0, call.context.dense(), StatsRequest(accumulation="exact")).accumulation.lower
    found = measured(call, upstream)["accumulation"].double()
    torch.testing.assert_close(found[..., 1:], exact[..., 1:], rtol=MIDDLE, atol=0.0)
    assert found[..., 0].isnan().all()  # a single key


def test_nan_where_nobody_looks_reaches_no_row():
    call, upstream = call_of(RULES["padding"])
    clean = assert_measured(call, upstream)
    key, value = call.key.clone(), call.value.clone()
    key[:, :, 2], value[:, :, 2] = math.nan, math.inf
    broken = replace(call, key=key, value=value)
    found = measured(broken, upstream)
    for name, x in clean.items():
        torch.testing.assert_close(found[name], x, equal_nan=True)


def test_rows_without_a_key_count_nowhere():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask[4] = False
    call, upstream = call_of({"attn_mask": mask})
    found = assert_measured(call, upstream)
    assert all(x[..., 4].isnan().all() for x in found.values())


def test_memory_that_is_given_to_another_tensor_is_not_the_same():
    x = torch.zeros(64)
    identity, address = TensorIdentity(x), x.data_ptr()
    del x
    for _ in range(100):
        other = torch.zeros(64)
        assert not identity.matches(other)
        if other.data_ptr() == address:
            break
    assert not identity.matches(torch.zeros(64), torch.zeros(64))
