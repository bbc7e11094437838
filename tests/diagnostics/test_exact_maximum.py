"""The largest logit of each head: exact over all rows in records, bracketed at every step, at no change of a number."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import tiny_gpt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale import Monitor, MultiheadAttention, ScaledDotProductAttention
from attnscale.attention import bind
from attnscale.backends import dispatch
from attnscale.backends.reference import raw_scores
from attnscale.diagnostics import tracking
from attnscale.diagnostics.tracking import LogitTracker
from attnscale.statistics.rows import attend as row_engine

ATTENTION = "ScaledDotProductAttention"


def qkv(*shape, seed=0, kv_heads=None, dtype=torch.float32):
    """Three tensors [B, H, T, D] with one large query row, which 64 sampled rows of 256 miss."""
    shape = shape or (2, 4, 256, 16)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    q[:, 1, 101] *= 10
    k, v = (x if kv_heads is None else x[:, :kv_heads] for x in (k, v))
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


def truth(*arguments, keep=None, **rules):
    """The largest logit [H] in fp64, of the rows [B, Tq] to `keep`."""
    _, call, backend, policy = bind(*(x.detach().double() for x in arguments), **rules)
    call = dispatch.prepare(call, policy, backend).call
    beta = call.row_beta()[..., None]
    logits = raw_scores(call) * beta
    dense = call.context.dense()
    logits = logits if dense is None else logits.masked_fill(~dense, -math.inf)
    if keep is not None:
        logits = logits.masked_fill(~keep[:, None, :, None], -math.inf)
    return logits.amax((0, 2, 3)).float()


def padded(batch, length, left):
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, : length // 4 if left else None] = left
    padding[1, -length // 3 :] = not left
    return padding


def masked_rows(batch, length):
    """A mask that hides everything from some rows, whose logits are then not there at all."""
    mask = torch.ones(batch, 1, length, length, dtype=torch.bool).tril()
    mask[:, :, 7] = False
    return mask


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 20},
    "softcap": {"is_causal": True, "softcap": 5.0},
    "blockwise": {"is_causal": True, "backend": "blockwise"},
    "reference": {"is_causal": True, "backend": "reference"},
    "bool mask": {"attn_mask": masked_rows(2, 256)},
    "bias": {"attn_mask": torch.linspace(-3, 3, 256).expand(256, 256).clone()},
    "negative": {"attn_mask": torch.full((256, 256), -60.0)},
    "sinks": {"is_causal": True, "sinks": torch.full((4,), 200.0)},
}
KNOWN = {"softcap": "exact", "blockwise": "exact", "sinks": "exact", "reference": "nothing"}


@pytest.mark.parametrize("policy", ["constant", "log"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_records_have_the_maximum_of_all_rows_and_other_steps_a_bracket(name, policy, kv_heads):
    rules = {**CALLS[name], "enable_gqa": kv_heads is not None}
    attention, inputs = ScaledDotProductAttention(policy), qkv(kv_heads=kv_heads)
    expected = truth(*inputs, policy=policy, **rules)
    with Monitor(attention, every=2, rows=16, alerts=None) as monitor:
        attention(*inputs, **rules)
        found = monitor.max_logits()[ATTENTION]
        torch.testing.assert_close(found.exact, expected, rtol=1e-5, atol=1e-5)
        records = monitor.step(0)
        assert monitor.max_logits() == {}
        attention(*inputs, **rules)
        found = monitor.max_logits()[ATTENTION]
        assert monitor.step(1) == []
    assert [record.forward["max_logit"].max for record in records] == pytest.approx(expected.tolist(), rel=1e-5)
    assert all(record.forward["max_logit"].rows <= 2 * 16 for record in records)
    assert found.finite.all()
    known = KNOWN.get(name, "bracket")
    if known == "exact":
        torch.testing.assert_close(found.exact, expected, rtol=1e-5, atol=1e-5)
    else:
        assert found.exact.isnan().all()
        assert (found.lower <= expected + 1e-4).all()
        assert (expected <= found.upper + 1e-4).all()
        width = found.upper - found.lower
        assert torch.allclose(width, torch.tensor(math.log(256) if known == "bracket" else math.inf))


@pytest.mark.parametrize("left", [False, True])
def test_padding_rows_do_not_count(left):
    inputs, padding = qkv(), padded(2, 256, left)
    with torch.no_grad():
        inputs[0][padding[:, None].expand(-1, 4, -1)] *= 1000
    expected = truth(*inputs, is_causal=True, key_padding=padding, keep=~padding)
    attention = ScaledDotProductAttention()
    with Monitor(attention, every=2, rows=16, alerts=None) as monitor:
        attention(*inputs, is_causal=True, key_padding=padding)
        records = monitor.step(0)
        attention(*inputs, is_causal=True, key_padding=padding)
        found = monitor.max_logits()[ATTENTION]
    assert [record.forward["max_logit"].max for record in records] == pytest.approx(expected.tolist(), rel=1e-5)
    assert (found.lower <= expected).all()
    assert (expected <= found.upper).all()
    assert (found.upper < 200).all()


def test_rows_that_see_nothing_have_no_logit():
    q, k = torch.ones(1, 2, 16, 8), -10 * torch.ones(1, 2, 16, 8)
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[3] = False
    attention = ScaledDotProductAttention()
    with Monitor(attention, every=10, alerts=None) as monitor:
        monitor.step(0)
        attention(q, k, k, attn_mask=mask)
        found = monitor.max_logits()[ATTENTION]
    assert found.upper.tolist() == pytest.approx([math.log(16) - 10 * math.sqrt(8)] * 2)


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_an_output_that_is_not_finite_is_told_by_head_and_its_rows_do_not_count(where):
    inputs = qkv()
    with torch.no_grad():
        inputs[["query", "key", "value"].index(where)][1, 2, -1] = math.nan
    attention = ScaledDotProductAttention()
    with Monitor(attention, every=2, alerts=None) as monitor:
        for step in range(2):
            attention(*inputs, is_causal=True)
            found = monitor.max_logits()[ATTENTION]
            assert found.finite.tolist() == [True, True, False, True]
            assert found.upper.isfinite().all()
            monitor.step(step)


def test_a_limit_has_an_exact_pass_made_over_the_heads_above_it_alone(monkeypatch):
    attention, inputs = ScaledDotProductAttention(), qkv(kv_heads=2)
    rules = {"is_causal": True, "enable_gqa": True}
    passes = []
    largest = row_engine.largest_row_logits
    monkeypatch.setattr(tracking, "largest_row_logits", lambda call: (passes.append(call), largest(call))[1])
    expected = truth(*inputs, **rules)
    with Monitor(attention, every=10, alerts=None) as monitor:
        monitor.step(0)
        tracker = LogitTracker(limit=20.0)
        monitor.layers[ATTENTION].trackers.append(tracker)
        attention(*inputs, **rules)
        found = tracker.read()
        assert [call.query.shape[1] for call in passes] == [1]
        torch.testing.assert_close(found.exact, torch.where(expected > 20, expected, math.nan), equal_nan=True)
        assert expected.gt(20).tolist() == [False, True, False, False]
        tracker.limit = 1000.0
        attention(*inputs, **rules)
        assert len(passes) == 1


def test_an_exact_call_decides_over_a_bracket_below_it():
    tracker = LogitTracker()
    tracker.add(2, torch.tensor([[3.0, 1.0], [9.0, 4.0], [0.0, 0.0]]))
    tracker.add(2, torch.tensor([[12.0, 2.0], [12.0, 2.0], [0.0, 1.0]]))
    found = tracker.read()
    assert found.exact[0] == 12
    assert (found.exact[1].isnan(), found.lower[1], found.upper[1]) == (True, 2, 4)
    assert found.finite.tolist() == [True, False]


def test_a_call_that_returns_its_weights_leaves_the_steps_between_without_bounds():
    attention = MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    with Monitor(attention, every=2, alerts=None) as monitor:
        attention(x, x, x)
        measured = monitor.max_logits()["MultiheadAttention"].exact
        monitor.step(0)
        attention(x, x, x)
        found = monitor.max_logits()["MultiheadAttention"]
    assert measured.isfinite().all()
    assert found.upper.tolist() == [math.inf] * 2
    assert found.lower.tolist() == [-math.inf] * 2


def test_what_is_not_tracked_is_not_there():
    attention = ScaledDotProductAttention()
    with Monitor(attention, every=2, alerts=None, track=False) as monitor:
        inputs = qkv()
        attention(*inputs)
        assert monitor.max_logits() == {}
        records = monitor.step(0)
        assert not attention.tap.tracking
    assert records[1].forward["max_logit"].max == pytest.approx(truth(*inputs)[1].item())


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policy", ["constant", "log"])
@pytest.mark.parametrize("name", [*CALLS, "dropout", "math"])
def test_a_tracked_call_has_the_same_bits_and_gradients(name, policy, autocast, dtype):
    if autocast and dtype == torch.float64 and name in ("bias", "negative"):
        pytest.skip("torch rejects the mask, which autocast rounds")
    rules = {"dropout": {"is_causal": True, "dropout_p": 0.3}, "math": {"is_causal": True}, **CALLS}[name]
    attention = ScaledDotProductAttention(policy)

    def results():
        inputs = qkv(2, 4, 256, 16, dtype=dtype)
        torch.manual_seed(3)
        kernels = sdpa_kernel([SDPBackend.MATH]) if name == "math" else nullcontext()
        with kernels, torch.autocast("cpu", enabled=autocast):
            out = attention(*inputs, **rules)
        out.float().square().sum().backward()
        return [out, *(x.grad for x in inputs)]

    plain = results()
    with Monitor(attention, every=10, alerts=None) as monitor:
        monitor.step(0)
        assert not attention.tap.open
        tracked = results()
        assert ATTENTION in monitor.max_logits()
    assert all(torch.equal(one, other) for one, other in zip(plain, tracked, strict=True))


def largest_in(model, monitor, *batches):
    for tokens in batches:
        model.loss(tokens).backward()
    return {path: found.upper for path, found in monitor.max_logits().items()}


@torch.no_grad()
def validate(model):
    """Evaluate a model whose second layer has larger logits than in training."""
    recompute, model.recompute = model.recompute, None
    model.eval()
    model.blocks[1].inner.weight.mul_(4)
    model.loss(tiny_gpt.batch(1))
    model.blocks[1].inner.weight.div_(4)
    model.train()
    model.recompute = recompute


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("step", [0, 1])
def test_checkpointing_and_micro_batches_give_the_maximum_of_all_calls(recompute, step):
    plain, model = tiny_gpt.build(), tiny_gpt.build()
    model.recompute = recompute
    batches = [tiny_gpt.batch(seed) for seed in range(3)]
    with Monitor(plain, every=2, alerts=None) as monitor:
        monitor._listen(step == 0, step)
        each = [largest_in(plain, monitor, tokens) for tokens in batches]
        together = each[-1]
        assert any(not torch.equal(each[0][path], together[path]) for path in together)
    with Monitor(model, every=2, alerts=None) as monitor:
        monitor._listen(step == 0, step)
        validate(model)
        found = largest_in(model, monitor, *batches)
        assert monitor.max_logits()["blocks.0.attention"].exact.isnan().any() == (step == 1)
    assert all(torch.equal(found[path], together[path]) for path in together)


def test_validation_does_not_count_beside_training_and_counts_alone():
    model = tiny_gpt.build(policy="constant")
    path = "blocks.1.attention"
    with Monitor(model, every=10, alerts=None) as monitor:
        monitor.step(0)
        expected = largest_in(model, monitor, tiny_gpt.batch(0))[path]
        monitor.step(1)
        validate(model)
        alone = monitor.max_logits()[path].upper
        model.loss(tiny_gpt.batch(0)).backward()
        validate(model)
        assert torch.equal(monitor.max_logits()[path].upper, expected)
        assert (alone > expected).all()


@pytest.mark.parametrize("policy", ["constant", "log"])
def test_a_compiled_graph_tracks_every_step_and_is_compiled_once(policy):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, same = tiny_gpt.build(policy=policy), tiny_gpt.build(policy=policy)
    with Monitor(model, every=3, alerts=None) as monitor, Monitor(same, every=3, alerts=None) as eager:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(4):
            tokens = tiny_gpt.batch(step)
            torch.nn.functional.cross_entropy(
                compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
            ).backward()
            same.loss(tokens).backward()
            found, expected = monitor.max_logits(), eager.max_logits()
            assert found.keys() == expected.keys()
            for path in expected:
                torch.testing.assert_close(found[path], expected[path], equal_nan=True)
            assert bool(monitor.step(step)) == bool(eager.step(step))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_failing_tracker_warns_and_is_tried_again_at_the_next_step(monkeypatch):
    attention, inputs = ScaledDotProductAttention(), qkv()
    with Monitor(attention, every=10, alerts=None) as monitor:
        monitor.step(0)
        with monkeypatch.context() as broken:
            broken.setattr(LogitTracker, "add", lambda *_: 1 / 0)
            attention(*inputs)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
            monitor.step(1)
        attention(*inputs)
        assert ATTENTION in monitor.max_logits()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_func_and_nested_tensors_pass_untracked():
    attention = ScaledDotProductAttention()
    nested = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged)
    nested = nested.transpose(1, 2)
    inputs = [x.detach() for x in qkv(2, 4, 256, 8)]
    slopes = torch.func.grad(lambda q: attention(q, *inputs[1:]).sum())
    plain = slopes(inputs[0]), attention(nested, nested, nested).values()
    with Monitor(attention, every=10, alerts=None) as monitor:
        for step in range(2):
            assert torch.equal(slopes(inputs[0]), plain[0])
            assert torch.equal(attention(nested, nested, nested).values(), plain[1])
            if step == 0:
                with pytest.warns(RuntimeWarning, match=r"torch\.func"):
                    monitor.step(step)


def test_a_transformers_model_is_tracked_as_it_generates():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(1, 9)[None]
    plain = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with Monitor(model, every=2, alerts=None) as monitor:
        for step in range(2):
            assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0), plain)
            found = monitor.max_logits()
            assert len(found) == 2
            assert all(largest.upper.isfinite().all() and largest.finite.all() for largest in found.values())
            monitor.step(step)
