"""The monitor's numbers, held against fp64 on what hooks saw of q, k and v: in every way a model can be run."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import tiny_gpt
import torch
from torch import nn

from attnscale import Monitor, MultiheadAttention, StatsRequest, convert, row_statistics
from attnscale.diagnostics import MemorySink
from attnscale.statistics import sample_rows
from attnscale.statistics.rows.quantities import THRESHOLDS, gap_name

MARKS = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@contextmanager
def calls_of(model):
    """The query, key, value and output (with their gradients, after backward) of each call of each attention."""
    seen, hooks = {}, []

    def note(path):
        def hook(module, arguments, out):
            q, k, v = arguments[:3]
            for tensor in (q, k, v, out):
                if tensor.requires_grad:
                    tensor.retain_grad()
            seen.setdefault(path, []).append((q, k, v, out))

        return hook

    for path, module in model.named_modules():
        if hasattr(module, "policy") and hasattr(type(module), "tap"):
            hooks.append(module.register_forward_hook(note(path)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def expected(calls, policy, rows, seed):
    """What a record of each head should say, from q, k, v and gradients, in fp64."""
    length = calls[0][0].shape[2]
    chosen = sample_rows(length, rows or length, seed, torch.device("cpu"))
    mask = torch.ones(length, length).tril().bool()[chosen]
    beta = policy(torch.arange(1, length + 1)).double()[chosen]
    request = StatsRequest(gap_thresholds=THRESHOLDS, accumulation="exact")
    gathered = {}
    for q, k, v, out in calls:
        q, k, v, out = (x.detach().double() if x.grad is None else _with_grad(x) for x in (q, k, v, out))
        scores = q[:, :, chosen] @ k.mT / math.sqrt(q.shape[-1])
        stats = row_statistics(scores, beta.expand(scores.shape[:-1]), mask, request)
        found = {
            "w_max": stats.w_max,
            "entropy": stats.entropy,
            "max_logit": stats.max_logit,
            "visible": stats.visible.double(),
            "beta": beta.expand(stats.w_max.shape),
        }
        found |= {gap_name(t): stats.gap_counts[..., i].double() for i, t in enumerate(THRESHOLDS)}
        if hasattr(out, "gradient"):
            logits = (scores * beta[:, None]).masked_fill(~mask, -math.inf)
            weights = logits.softmax(-1)
            pull = out.gradient[:, :, chosen] @ v.mT
            dlogits = weights * (pull - (weights * pull).sum(-1, keepdim=True))
            found["score_gradient"] = (dlogits * beta[:, None]).norm(dim=-1)
            found["beta_gradient"] = (dlogits * scores).sum(-1)
        for name, value in found.items():
            gathered.setdefault(name, []).append(value.transpose(0, 1).flatten(1))
    return {name: torch.cat(values, dim=1) for name, values in gathered.items()}


def _with_grad(x):
    wide = x.detach().double()
    wide.gradient = x.grad.double()
    return wide


def assert_equal(records, model, seen, rows, seed, rtol=1e-4, backward=True):
    for path, calls in seen.items():
        policy = model.get_submodule(path).policy
        truth = expected(calls, policy, rows, seed)
        largest = expected(calls, policy, None, seed)["max_logit"].amax(-1)  # over all rows, sampled or not
        for record in (record for record in records if record.layer == path):
            for phase in ("forward", "backward") if backward else ("forward",):
                summaries = getattr(record, phase)
                assert summaries
                for name in truth.keys() & summaries.keys():
                    values, summary = truth[name][record.head], summaries[name]
                    scale = {"rel": rtol, "abs": rtol}
                    assert summary.rows == values.numel()
                    assert summary.mean == pytest.approx(values.mean().item(), **scale), (phase, name)
                    assert summary.min == pytest.approx(values.min().item(), **scale)
                    most = largest[record.head] if name == "max_logit" else values.max()
                    assert summary.max == pytest.approx(most.item(), **scale)
                    for mark, level in MARKS.items():
                        assert getattr(summary, mark) == pytest.approx(values.quantile(level).item(), **scale)
            if backward:
                assert {"score_gradient", "beta_gradient"} <= record.backward.keys()
                assert record.scalars["mismatch"] == 0.0


def train_step(model, *batches):
    for tokens in batches:
        model.loss(tokens).backward()


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_records_hold_what_fp64_gives_for_the_same_rows(rows, policy):
    model = tiny_gpt.build(policy=policy)
    with Monitor(model, every=1, rows=rows) as monitor, calls_of(model) as seen:
        train_step(model, tiny_gpt.batch())
        records = monitor.step(0)
    assert [(record.layer, record.head) for record in records] == [
        (f"blocks.{layer}.attention", head) for layer in range(2) for head in range(2)
    ]
    assert_equal(records, model, seen, rows, seed=0)


def test_gradient_norms_and_gain_are_those_of_autograd():
    model = tiny_gpt.build()
    with Monitor(model, every=1) as monitor, calls_of(model) as seen:
        train_step(model, tiny_gpt.batch())
        records = monitor.step(0)
    for record in records:
        q, k, v, out = (x.grad[:, record.head].norm().item() for x in seen[record.layer][0])
        assert record.scalars["query_gradient"] == pytest.approx(q, rel=1e-4)
        assert record.scalars["key_gradient"] == pytest.approx(k, rel=1e-4)
        assert record.scalars["value_gradient"] == pytest.approx(v, rel=1e-4)
        assert record.scalars["output_gradient"] == pytest.approx(out, rel=1e-4)
        assert record.scalars["gain"] == pytest.approx(math.hypot(q, k, v) / out, rel=1e-4)


def test_the_angle_ratio_compares_pairs_of_values_and_of_outputs():
    model = tiny_gpt.build()
    with Monitor(model, every=1, rows=None) as monitor, calls_of(model) as seen:
        train_step(model, tiny_gpt.batch())
        records = monitor.step(0)

    def spread(x):  # [B, T, D]: mean over sequences and pairs of 1 − cosine
        unit = nn.functional.normalize(x.detach().double(), dim=-1)
        cosines = unit @ unit.mT
        pairs = torch.ones_like(cosines[0]).triu(1).bool()
        return (1 - cosines[:, pairs]).mean().item()

    for record in records:
        _, _, v, out = (x[:, record.head] for x in seen[record.layer][0])
        assert record.scalars["angle_ratio"] == pytest.approx(spread(out) / spread(v), rel=1e-4)


@pytest.mark.parametrize("recompute", ["reentrant", "saved tensors"])
def test_checkpointing_counts_every_row_once(recompute):
    plain, checkpointed = tiny_gpt.build(), tiny_gpt.build()
    checkpointed.recompute = recompute
    found = []
    for model in (plain, checkpointed):
        with Monitor(model, every=1, rows=9) as monitor:
            train_step(model, tiny_gpt.batch())
            found.append(monitor.step(0))
    for one, other in zip(*found, strict=True):
        assert one.forward == other.forward
        assert one.backward == other.backward
        assert one.scalars == pytest.approx(other.scalars)


def test_micro_batches_and_several_forwards_before_a_backward_are_all_counted():
    model = tiny_gpt.build()
    batches = [tiny_gpt.batch(seed) for seed in range(3)]
    with Monitor(model, every=1, rows=5) as monitor, calls_of(model) as seen:
        train_step(model, *batches)
        apart = monitor.step(0)
        assert_equal(apart, model, seen, 5, seed=0)
    with Monitor(model, every=1, rows=5) as monitor:
        sum(model.loss(tokens) for tokens in batches).backward()
        together = monitor.step(0)
    for one, other in zip(apart, together, strict=True):
        for phase in ("forward", "backward"):
            for name, summary in getattr(one, phase).items():
                assert tuple(summary) == pytest.approx(tuple(getattr(other, phase)[name]), rel=1e-5, abs=1e-7)
        assert other.scalars["mismatch"] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_seen_as_it_is_computed(dtype):
    model = tiny_gpt.build()
    with Monitor(model, every=1, rows=9) as monitor, calls_of(model) as seen:
        with torch.autocast("cpu", dtype=dtype):
            loss = model.loss(tiny_gpt.batch())
        loss.backward()
        records = monitor.step(0)
    assert seen["blocks.0.attention"][0][0].dtype == dtype
    assert_equal(records, model, seen, 9, seed=0, rtol=2e-2 if dtype == torch.bfloat16 else 4e-3)


def test_eval_mode_has_a_forward_and_no_backward():
    model = tiny_gpt.build().eval()
    with Monitor(model, every=1) as monitor, calls_of(model) as seen, torch.no_grad():
        model(tiny_gpt.batch())
        records = monitor.step(0)
    assert_equal(records, model, seen, 64, seed=0, backward=False)
    assert all(not record.backward and "gain" not in record.scalars for record in records)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_reports_the_same_and_is_not_compiled_again_by_the_cadence(backend):
    plain, model = tiny_gpt.build(), tiny_gpt.build()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    reports = []
    with Monitor(plain, every=2, rows=9) as one, Monitor(model, every=2, rows=9) as other:
        for step in range(5):
            tokens = tiny_gpt.batch(step)
            plain.loss(tokens).backward()
            nn.functional.cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            reports.append((one.step(step), other.step(step)))
    assert [bool(eager) for eager, _ in reports] == [True, False, True, False, True]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for eager, compiled_ in reports:
        for a, b in zip(eager, compiled_, strict=True):
            assert a.backward.keys() == b.backward.keys()
            for phase in ("forward", "backward"):
                for name, summary in getattr(a, phase).items():
                    found = getattr(b, phase)[name]
                    if name in ("accumulation", "criticality"):  # the rounding of a near tie moves the extremes
                        assert summary.p50 == pytest.approx(found.p50, rel=2e-2)
                    else:
                        assert tuple(summary) == pytest.approx(tuple(found), rel=1e-3, abs=1e-4), name


def test_shared_and_nested_modules_appear_once_under_their_first_path():
    inner = tiny_gpt.build()
    shared = inner.blocks[0]
    inner.blocks[1] = shared
    model = nn.ModuleDict({"tower": inner})
    with Monitor(model, every=1) as monitor:
        train_step(inner, tiny_gpt.batch())
        records = monitor.step(0)
    assert {record.layer for record in records} == {"tower.blocks.0.attention"}
    assert all(record.forward["visible"].rows == 2 * 2 * 23 for record in records)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_and_converted_models_are_found(need_weights):
    attention = MultiheadAttention(16, 2, batch_first=True, policy="log")
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Monitor(attention, every=1) as monitor:
        attention(x, x, x, is_causal=True, need_weights=need_weights)[0].sum().backward()
        records = monitor.step(0)
    assert len(records) == 2
    assert all(record.backward and record.forward["visible"].max == 9 for record in records)

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2)
    with convert(encoder, "log"), Monitor(encoder, every=1) as monitor:
        encoder(x).sum().backward()
        records = monitor.step(0)
    assert {record.layer for record in records} == {"layers.0.self_attn", "layers.1.self_attn"}


def test_recomputing_something_else_is_flagged():
    model = tiny_gpt.build()
    attention = model.blocks[1].attention
    model.recompute = "reentrant"
    original = attention.policy
    with Monitor(model, every=1, alerts=None) as monitor:
        loss = model.loss(tiny_gpt.batch())
        attention.policy = type(original)(gamma=2.0)  # what backward computes again is not what forward computed
        loss.backward()
        records = monitor.step(0)
    by_layer = {record.layer: record.scalars["mismatch"] for record in records}
    assert by_layer["blocks.0.attention"] == 0.0
    assert by_layer["blocks.1.attention"] > 0.01


def test_every_sink_gets_the_same_records():
    model, sinks = tiny_gpt.build(), [MemorySink(), MemorySink()]
    with Monitor(model, every=1, sinks=sinks) as monitor:
        train_step(model, tiny_gpt.batch())
        records = monitor.step(0)
    assert sinks[0].records == sinks[1].records == records
