"""Policies that read scores: β from the gaps or entropy of a row, or from a running estimate per head."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from oracle import tensors
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import (
    ArgumentError,
    AttnScaleError,
    MultiheadAttention,
    StatsRequest,
    accumulation_scale,
    attention_with_stats,
    build_policy,
    scaled_dot_product_attention,
)
from attnscale.policies.adaptive import inverse_zeta
from attnscale.statistics.gaps import BRACKET_WIDTH

RULES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 9},
    "padding": {"is_causal": True, "key_padding": torch.arange(24) < 3},
    "packed": {"is_causal": True, "cu_seqlens": torch.tensor([0, 7, 24])},
    "softcap": {"softcap": 2.0},
}


def scores_of(q, k, visible=None, softcap=None):
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def visible_of(rule):
    from oracle import visibility

    return {
        "full": visibility(24, 24),
        "causal": visibility(24, 24, causal=True),
        "window": visibility(24, 24, causal=True, window=9),
        "padding": visibility(24, 24, causal=True, padding=tuple(i < 3 for i in range(24))),
        "packed": visibility(24, 24, causal=True, documents=tuple(int(i >= 7) for i in range(24))),
        "softcap": visibility(24, 24),
    }[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("exact", [True, False])
def test_beta_is_r_times_the_rows_own_scale(rule, exact):
    q, k, v = tensors((2, 4, 24, 16), (2, 2, 24, 16))
    policy = build_policy("gap_adaptive", r=1.5, exact=exact, floor=0.5, ceiling=20.0)
    visible = visible_of(rule)
    scores = scores_of(q, k, softcap=RULES[rule].get("softcap"))
    scale = accumulation_scale(scores, 2, visible)
    beta = (1.5 * scale).clamp(0.5, 20.0)
    seen = attention_with_stats(q, k, v, enable_gqa=True, policy=policy, **RULES[rule]).stats
    used = seen.max_logit / scores.masked_fill(~visible, -math.inf).amax(-1)
    several = visible.sum(-1).expand(used.shape) > 0
    tolerance = 1e-5 if exact else BRACKET_WIDTH
    low, high = beta * (1 - 1e-5), (beta * (1 + tolerance)).clamp(max=20.0 * (1 + 1e-5))
    assert ((used >= low) & (used <= high))[several].all()


@pytest.mark.parametrize("target", [0.3, 0.6, 0.9])
def test_the_target_weight_is_reached_by_every_row_below_the_ceiling(target):
    q, k, v = tensors((2, 4, 200, 16), (2, 4, 200, 16), torch.float32)
    policy = build_policy("gap_adaptive", target_w_max=target, ceiling=1e4)
    stats = attention_with_stats(q, k, v, is_causal=True, policy=policy).stats
    assert (stats.w_max[~stats.at_ceiling] >= target - 1e-5).all()
    assert stats.at_ceiling.float().mean() < 0.05


def test_zeta_is_inverted():
    assert inverse_zeta(math.pi**2 / 6) == pytest.approx(2.0, rel=1e-12)
    assert inverse_zeta(1.0823232337111382) == pytest.approx(4.0, rel=1e-9)


def test_a_tie_gets_the_ceiling_and_a_lone_key_the_floor():
    q = torch.ones(1, 1, 3, 4)
    k = torch.tensor([[1.0], [1.0], [0.0]]).expand(3, 4)[None, None]
    policy = build_policy("gap_adaptive", r=2.0, floor=0.25, ceiling=8.0)
    stats = attention_with_stats(q, k, k, is_causal=True, policy=policy).stats
    raw = 4 * 4**-0.5
    assert stats.max_logit[0, 0].tolist() == pytest.approx([0.25 * raw, 8.0 * raw, 8.0 * raw])
    assert stats.at_ceiling[0, 0].tolist() == [False, True, True]


def test_decoding_equals_prefill():
    q, k, v = tensors((2, 4, 24, 16), (2, 2, 24, 16))
    for policy in (build_policy("gap_adaptive", r=1.5), build_policy("entropy_adaptive")):
        whole = attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, policy=policy)
        for t in range(24):
            token = attnscale.scaled_dot_product_attention(
                q[:, :, t : t + 1], k, v, is_causal=True, enable_gqa=True, policy=policy, cache_offset=t
            )
            torch.testing.assert_close(token[:, :, 0], whole[:, :, t], rtol=1e-5, atol=1e-5)


def test_entropy_adaptive_is_the_published_polynomial():
    q, k, v = tensors((2, 4, 24, 16), (2, 4, 24, 16))
    scores = scores_of(q, k)
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
    p = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    beta = torch.where(entropy > 0.5, p.clamp(min=1.0), 1.0)
    expected = (beta[..., None] * scores).softmax(-1) @ v
    out = attnscale.scaled_dot_product_attention(q, k, v, policy="entropy_adaptive")
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert (beta > 1).any()


def test_through_differentiates_the_scale():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 6, 4), (1, 1, 6, 4)))

    def attend(policy, q, k, v):
        scores = scores_of(q, k)
        ordered = scores.sort(-1, descending=True).values
        slopes = torch.arange(2, 7).log() / (ordered[..., :1] - ordered[..., 1:])
        beta = 1.5 * slopes.amax(-1)
        return (beta.clamp(1e-6, 64.0)[..., None] * scores).softmax(-1) @ v

    through = build_policy("gap_adaptive", r=1.5, exact=True, gradient="through")
    detached = build_policy("gap_adaptive", r=1.5, exact=True)
    expected = torch.autograd.grad(attend(through, q, k, v).square().sum(), (q, k, v))
    got, cut = (
        torch.autograd.grad(
            attnscale.scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=policy).square().sum(), (q, k, v)
        )
        for policy in (through, detached)
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cut[0], expected[0], rtol=1e-2)


def head_policy(**kwargs):
    return build_policy("gap_adaptive", r=1.0, scope="head", num_heads=2, **kwargs)


def test_a_heads_estimate_follows_the_harmonic_mean_against_length():
    policy = head_policy(momentum=0.0, exact=True)
    q, k, v = tensors((8, 2, 200, 16), (8, 2, 200, 16), torch.float32)
    attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy)
    policy.eval()
    visible = torch.ones(200, 200, dtype=torch.bool).tril()
    scale = accumulation_scale(scores_of(q, k), 2, visible)[..., 1:].double()
    n = torch.arange(2, 201)
    x = 1 / n.double().log()
    for head in range(2):
        design = torch.stack([torch.ones_like(x), x], -1).repeat(8, 1)
        fit = torch.linalg.lstsq(design, (1 / scale[:, head]).reshape(-1, 1)).solution[:, 0]
        expected = (1 / (fit[0] + fit[1] * x)).float()
        torch.testing.assert_close(policy(n)[head], expected, rtol=1e-3, atol=1e-3)


def test_a_heads_estimate_is_frozen_in_eval_and_the_same_in_prefill_and_decoding():
    policy = head_policy()
    q, k, v = tensors((2, 2, 24, 16), (2, 2, 24, 16))
    with pytest.raises(ArgumentError, match="has seen no rows"):
        attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy.eval())
    policy.train()
    attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy)
    policy.eval()
    before = policy.sums.clone()
    whole = attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy)
    assert torch.equal(policy.sums, before)
    for t in range(24):
        token = attnscale.scaled_dot_product_attention(
            q[:, :, t : t + 1], k, v, is_causal=True, policy=policy, cache_offset=t
        )
        torch.testing.assert_close(token[:, :, 0], whole[:, :, t], rtol=1e-5, atol=1e-5)
    other = head_policy()
    other.load_state_dict(policy.state_dict())
    assert torch.equal(other.eval()(torch.arange(2, 50)), policy(torch.arange(2, 50)))


def train(policy, steps: int, seed: int = 0, size: float = 1.0) -> None:
    for step in range(steps):
        q, k, v = tensors((2, 2, 64, 16), (2, 2, 64, 16), torch.float32, seed=seed + step)
        scaled_dot_product_attention(size * q, k, v, is_causal=True, policy=policy)


@pytest.mark.parametrize("size", [900.0, 1e6, 1e-3, 0.0])
def test_one_step_far_off_hardly_moves_a_heads_estimate(size):
    policy = head_policy()
    train(policy, 50)
    before = policy.eval()(64)
    train(policy.train(), 1, size=size)
    torch.testing.assert_close(policy.eval()(64), before, rtol=0.05, atol=0)


def test_a_lasting_change_is_followed():
    policy = head_policy(momentum=0.9)
    train(policy, 20)
    before = policy.eval()(64)
    train(policy.train(), 60, size=20.0)
    torch.testing.assert_close(policy.eval()(64) * 20, before, rtol=0.15, atol=0)


def test_rows_that_cannot_be_used_leave_a_heads_estimate_as_it_was():
    policy = head_policy()
    train(policy, 5)
    before = policy.sums.clone()
    q, k, v = tensors((2, 2, 64, 16), (2, 2, 64, 16), torch.float32)
    k[:, 1] = math.nan
    scaled_dot_product_attention(q, k, v, is_causal=True, policy=policy)
    assert torch.equal(policy.sums[1], before[1])
    assert not torch.equal(policy.sums[0], before[0])
    assert torch.isfinite(policy.sums).all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_first_call_of_nan_alone_gives_nan_and_learns_nothing(compiled):
    policy = head_policy()
    q, k, v = tensors((2, 2, 64, 16), (2, 2, 64, 16), torch.float32)
    attend = scaled_dot_product_attention
    if compiled:
        attend = torch.compile(attend, backend="aot_eager")
    assert attend(q, k * math.nan, v, is_causal=True, policy=policy).isnan().all()
    assert (policy.sums == 0).all()
    with pytest.raises(ArgumentError, match="has seen no rows"):
        policy.eval()(64)
    assert torch.isfinite(attend(q, k, v, is_causal=True, policy=policy.train())).all()
    assert torch.isfinite(policy.eval()(64)).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_does_not_learn_again(use_reentrant):
    policy = head_policy()
    train(policy, 3)
    q, k, v = tensors((2, 2, 64, 16), (2, 2, 64, 16), torch.float32)
    found = []
    for checkpointed in (False, True):
        own, x = copy.deepcopy(policy), (5 * q).requires_grad_()

        def attend(x, own=own):
            return scaled_dot_product_attention(x, k, v, is_causal=True, policy=own)

        out = checkpoint(attend, x, use_reentrant=use_reentrant) if checkpointed else attend(x)
        out.sum().backward()  # reentrant checkpoints do not support torch.autograd.grad
        found.append((x.grad, own.sums))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_modules_take_them_like_any_other():
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    for policy in (
        {"name": "gap_adaptive", "target_w_max": 0.6},
        "entropy_adaptive",
        {"name": "gap_adaptive", "r": 1.0, "scope": "head"},
    ):
        module = MultiheadAttention(16, 4, batch_first=True, policy=policy)
        fast, _ = module(x, x, x, is_causal=True, need_weights=False)
        slow, _ = module(x, x, x, is_causal=True, average_attn_weights=False)
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
        fast.sum().backward()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"r": 1.0, "target_w_max": 0.5}, "r=1.0 is not accepted.*target_w_max"),
        ({"r": 0.0}, "r=0.0"),
        ({"scope": "head"}, "num_heads=None"),
        ({"target_w_max": 1.0}, r"target_w_max=1.0"),
        ({"target_w_max": 0.5, "min_rank": 8}, "min_rank=8"),
        ({"r": 1.0, "ceiling": 0.1, "floor": 0.5}, "ceiling=0.1"),
        ({"r": 1.0, "scope": "layer"}, "scope='layer'"),
        ({"r": 1.0, "gradient": "yes"}, "gradient='yes'"),
        ({"r": 1.0, "scope": "head", "num_heads": 2, "gradient": "through"}, "gradient='through'"),
        ({"r": 1.0, "momentum": 1.0}, "momentum=1.0"),
    ],
)
def test_what_cannot_be_is_refused(parameters, message):
    with pytest.raises(AttnScaleError, match=message):
        build_policy("gap_adaptive", **parameters)


def test_sampled_statistics_carry_the_ceiling_of_their_rows():
    q, k, v = tensors((1, 2, 40, 16), (1, 2, 40, 16))
    policy = build_policy("gap_adaptive", r=2.0, ceiling=6.0)
    whole = attention_with_stats(q, k, v, is_causal=True, policy=policy).stats
    some = attention_with_stats(q, k, v, is_causal=True, policy=policy, request=StatsRequest(rows=8)).stats
    assert torch.equal(some.at_ceiling, whole.at_ceiling[..., some.rows])
