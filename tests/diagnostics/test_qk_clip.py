"""QK-clip: the logits of a head above τ are brought to τ, all others stay to the bit, wherever the projections are."""

from __future__ import annotations

import math

import hf_zoo
import pytest
import tiny_gpt
import torch
from parallel_model import Run, whole
from ranks import on_two_ranks
from torch import nn
from torch.nn import functional as F

import attnscale
from attnscale import ArgumentError, ArgumentTypeError, Monitor, QKClip, ScaledDotProductAttention
from attnscale.diagnostics import Clipped
from attnscale.diagnostics.projections import role_factors


class NanoAttention(nn.Module):
    """The attention of nanoGPT."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.attention = heads, ScaledDotProductAttention("log")

    def forward(self, x):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.c_attn(x).chunk(3, dim=-1))
        return self.c_proj(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PlainAttention(NanoAttention):
    """The same, calling torch's function."""

    def __init__(self):
        super().__init__()
        del self.attention

    def attention(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


class Multihead(nn.Module):
    """A MultiheadAttention of any kind that attends to its input."""

    def __init__(self, **options):
        super().__init__()
        self.attention = attnscale.MultiheadAttention(16, 4, batch_first=True, **options)

    def forward(self, x):
        memory = x if self.attention.kdim == 16 else x[..., :8]
        return self.attention(x, memory, memory, need_weights=False)[0]


def converted(norm_first=False):
    layer = nn.TransformerEncoderLayer(16, 4, 16, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    attnscale.convert(model, "log")
    return model


OURS = {
    "nanoGPT": NanoAttention,
    "nanoGPT with torch's function": PlainAttention,
    "blocks with torch's function": lambda: nn.Sequential(PlainAttention(), PlainAttention()),
    "multihead": Multihead,
    "multihead of other keys": lambda: Multihead(kdim=8, vdim=8),
    "multihead with appended keys": lambda: Multihead(add_bias_kv=True, add_zero_attn=True),
    "converted": converted,
}
THEIRS = ["gpt2", "gpt_bigcode", "gpt_neox", "phi3", "llama", "qwen2", "opt", "bert", "distilbert", "deepseek_v3"]


def build(name):
    """A model with large random weights in every projection, in fp64, and a function that runs it on fixed inputs."""
    if name in OURS:
        torch.manual_seed(0)
        model = OURS[name]().double()
        inputs = torch.randn(2, 12, 16, dtype=torch.float64)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        if "appended" in name:
            nn.init.normal_(model.attention.bias_k, std=5.0)  # has the largest logits
        return model, lambda: model(inputs)
    model = hf_zoo.ZOO[name].build()
    inputs = hf_zoo.reading(model)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.5)  # biases, too
    return model, lambda: model(**inputs)


def largest(model, run):
    """The largest logits of the first layer, whose inputs no other layer changes, and its path."""
    with Monitor(model, alerts=None) as monitor, torch.no_grad():
        run()
        path, found = next(iter(monitor.max_logits().items()))
    return path, found.exact


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.8])
@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_heads_above_the_limit_have_it_as_their_maximum_and_others_the_same_bits(name, alpha):
    model, run = build(name)
    path, before = largest(model, run)
    tau = float(before.sort().values[-3:-1].mean())  # two heads are above it, where there are four
    with QKClip(model, tau=tau, alpha=alpha) as clip:
        with torch.no_grad():
            run()
        found = [clipped for clipped in clip.step() if clipped.layer == path]
    _, after = largest(model, run)
    above = before > tau
    assert [clipped.head for clipped in found] == above.nonzero()[:, 0].tolist()
    assert 0 < len(found) < len(before)
    for clipped in found:
        assert clipped.max_logit == pytest.approx(float(before[clipped.head]))
        assert clipped.factor == pytest.approx(tau / clipped.max_logit)
    torch.testing.assert_close(after[above], torch.full_like(after[above], tau), rtol=1e-6, atol=0)
    assert torch.equal(after[~above], before[~above])


def test_every_logit_of_a_head_has_its_factor():
    model, run = build("llama")
    seen = []

    def note(site, arguments):
        query, key = arguments[:2]
        seen.append(query @ key.repeat_interleave(2, dim=1).mT)

    with QKClip(model, tau=1.0) as clip:
        hook = model.model.layers[0].self_attn.attnscale.register_forward_pre_hook(note)
        with torch.no_grad():
            run()
            factors = torch.ones(4, dtype=torch.float64)
            for clipped in clip.step():
                if clipped.layer == "model.layers.0.self_attn":
                    factors[clipped.head] = clipped.factor
            run()
        hook.remove()
    assert factors.lt(1).any()
    torch.testing.assert_close(seen[1], seen[0] * factors[:, None, None], rtol=1e-9, atol=1e-9)


def test_heads_that_share_a_key_share_its_factor_and_an_unclipped_one_keeps_it():
    found = role_factors(torch.tensor([1.0, 0.25, 0.5, 0.25]), 2, 0.5)
    assert found["key"].tolist() == pytest.approx([1.0, math.sqrt(0.5)])
    assert found["query"].tolist() == pytest.approx([1.0, 0.25, math.sqrt(0.5), 0.25 / math.sqrt(0.5)])


@pytest.mark.parametrize("name", ["qwen3", "llama4_text", "nanochat", "olmo2"])
def test_normalised_queries_and_keys_are_refused(name):
    model = hf_zoo.ZOO[name].build()
    with pytest.raises(ArgumentError, match=r"normalises \(.*norm.*undoes"):
        QKClip(model)
    assert not any(hasattr(module, "attnscale") for module in model.modules())  # nothing is left behind


@pytest.mark.parametrize("name", ["t5", "dbrx", "modernbert"])
def test_what_is_unknown_is_refused_with_a_way_out(name):
    with pytest.raises(ArgumentError, match=r"(other parameters|unknown).*projections=\{path: \(q_proj, k_proj\)\}"):
        QKClip(hf_zoo.ZOO[name].build())


class Scaled(NanoAttention):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(4))


def test_learned_scales_adapters_and_parametrized_weights_are_refused():
    with pytest.raises(ArgumentError, match=r"other parameters \(logit_scale\)"):
        QKClip(Scaled())
    model = NanoAttention()
    nn.utils.parametrizations.weight_norm(model.c_attn)
    with pytest.raises(ArgumentError, match="parametrized"):
        QKClip(model)
    model = NanoAttention()
    model.c_attn = nn.Sequential(model.c_attn)
    with pytest.raises(ArgumentError, match=r"Sequential.*torch\.nn\.Linear"):
        QKClip(model)
    with pytest.raises(ArgumentError, match="no module around it"):
        QKClip(ScaledDotProductAttention())


def by_hand(kind):
    """A model with projections that no name tells, and how they are passed."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.fused = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 48)
            self.attention = ScaledDotProductAttention()

        def forward(self, x):
            if kind == "pair":
                q, k = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.a(x), self.b(x)))
                return self.attention(q, k, k, enable_gqa=True)
            if kind == "fused":
                return self.attention(*(y.unflatten(-1, (4, 4)).transpose(1, 2) for y in self.fused(x).chunk(3, -1)))
            return self.attention(*self.fused(x).unflatten(-1, (4, 3, 4)).transpose(1, 2).unbind(-2))

    torch.manual_seed(0)
    model = Own().double()
    values = {"pair": (model.a, model.b), "fused": model.fused, "by head": (model.fused, "by_head")}
    return model, {"attention": values[kind]}


@pytest.mark.parametrize("kind", ["pair", "fused", "by head"])
def test_projections_may_be_passed_by_hand(kind):
    model, projections = by_hand(kind)
    x = 3 * torch.randn(2, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, before = largest(model, lambda: model(x))
    tau = float(before.median() + before.max()) / 2
    with QKClip(model, tau=tau, projections=projections) as clip:
        model(x)
        assert [clipped.head for clipped in clip.step()] == before.gt(tau).nonzero()[:, 0].tolist()
    _, after = largest(model, lambda: model(x))
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-6, atol=0)
    with QKClip(model, tau=tau / 2, projections={"attention": None}) as clip:
        model(x)
        assert clip.step() == []


def test_projections_that_do_not_fit_are_refused():
    model, _ = by_hand("pair")
    for wrong in ({"attn": None}, {"attention": "q_proj"}, {"attention": (model.a, "columns")}):
        with pytest.raises(ArgumentError, match="projections"):
            QKClip(model, projections=wrong)
    with QKClip(model, tau=1e-3, projections={"attention": (model.b, model.a)}) as clip:
        model(torch.ones(1, 3, 16, dtype=torch.float64))
        with pytest.raises(ArgumentError, match=r"8 outputs do not fit 4 query heads of dimension 4"):
            clip.step()


def test_bad_arguments_are_refused_and_nothing_stays_attached():
    model = NanoAttention()
    for arguments in ({"tau": 0}, {"tau": math.inf}, {"alpha": 1.5}, {"masters": {model.c_attn.weight: torch.ones(2)}}):
        with pytest.raises(ArgumentError, match=f"{next(iter(arguments))}="):
            QKClip(model, **arguments)
    for arguments in ({"tau": "high"}, {"monitoring_only": 1}, {"masters": [1]}):
        with pytest.raises(ArgumentTypeError, match=f"{next(iter(arguments))}="):
            QKClip(model, **arguments)
    with pytest.raises(ArgumentTypeError, match="model="):
        QKClip("model")
    assert model.attention.tap is None


def test_monitoring_alone_changes_nothing_and_closing_restores_the_model():
    model = NanoAttention()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    with QKClip(model, tau=1e-3, monitoring_only=True) as clip:
        model(torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0)))
        found = clip.step()
        assert found
        assert isinstance(found[0], Clipped)
        assert clip.step() == []  # no call since
        with pytest.raises(ArgumentError, match="without a monitor or QKClip"):
            Monitor(model)
    clip.close()
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    with pytest.raises(ArgumentError, match="closed"):
        clip.step()


@pytest.mark.parametrize("monitor_first", [False, True])
def test_a_monitor_and_a_clip_share_their_tracking_in_any_order(monitor_first):
    def train(watched):
        torch.manual_seed(0)
        model = NanoAttention()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        monitor = Monitor(model, every=2, alerts=None) if watched else None
        clip = QKClip(monitor or model, tau=0.5)
        found, records = [], []
        for step in range(4):
            model(torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            if monitor is not None and monitor_first:
                records.append(monitor.step(step))
            found.append(clip.step())
            if monitor is not None and not monitor_first:
                records.append(monitor.step(step))
        clip.close()
        if monitor is not None:
            assert model.attention.tap is not None
            monitor.close()
        return found, records, model.state_dict()

    alone, _, state = train(False)
    found, records, watched = train(True)
    assert found == alone
    assert sum(map(len, found)) > 3
    assert all(torch.equal(x, state[name]) for name, x in watched.items())
    for step in (0, 2):
        tops = {record.head: record.forward["max_logit"].max for record in records[step]}
        assert [one.max_logit for one in found[step]] == [pytest.approx(tops[one.head]) for one in found[step]]


def test_a_clip_whose_monitor_is_closed_says_so():
    model = NanoAttention()
    monitor = Monitor(model, alerts=None)
    clip = QKClip(monitor)
    with pytest.raises(ArgumentError, match="process_group"):
        QKClip(monitor, process_group=object())
    monitor.close()
    with pytest.raises(ArgumentError, match="monitor of this QKClip is closed"):
        clip.step()
    clip.close()


def test_all_micro_batches_count_and_a_validation_pass_does_not():
    torch.manual_seed(0)
    model, x = NanoAttention(), torch.randn(3, 2, 12, 16)
    _, before = largest(model, lambda: model(x[1]))
    with QKClip(model, tau=float(before.max()) * 0.9) as clip:
        for part in x[:2] * torch.tensor([0.1, 1.0])[:, None, None, None]:
            model(part).sum().backward()
        model.eval()
        with torch.no_grad():
            model(100 * x[2])
        model.train()
        assert max(clipped.max_logit for clipped in clip.step()) == pytest.approx(float(before.max()))


def test_master_weights_are_scaled_alike():
    model, x = NanoAttention().bfloat16(), torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    masters = {parameter: parameter.detach().float() for parameter in model.parameters()}
    before = {parameter: master.clone() for parameter, master in masters.items()}
    with QKClip(model, tau=0.2, masters=masters) as clip:
        model(x)
        found = {clipped.head: clipped.factor for clipped in clip.step()}
    assert found
    weight = model.c_attn.weight
    factors = torch.ones(48)
    for head, factor in found.items():
        for start in (4 * head, 16 + 4 * head):
            factors[start : start + 4] = math.sqrt(factor)
    torch.testing.assert_close(masters[weight], before[weight] * factors[:, None])
    assert torch.equal(weight, (before[weight] * factors[:, None]).bfloat16())
    assert torch.equal(masters[model.c_proj.weight], before[model.c_proj.weight])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_compiled_and_checkpointed_models_are_clipped_alike(recompute, compiled):
    if compiled and recompute == "reentrant":
        pytest.skip("torch.compile does not trace reentrant checkpoints")

    def train(recompute, compiled):
        torch.compiler.reset()
        model = tiny_gpt.build()
        model.recompute = recompute
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inner = {f"blocks.{index}.attention": block.inner for index, block in enumerate(model.blocks)}
        found = []
        with QKClip(model, tau=0.5, projections=inner) as clip:
            for step in range(3):
                tokens = tiny_gpt.batch(step)
                F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                found += clip.step()
        return found, model

    expected, plain = train(None, False)
    found, model = train(recompute, compiled)
    assert [(clipped.layer, clipped.head) for clipped in found] == [(one.layer, one.head) for one in expected]
    assert len(found) > 2
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_run_whose_logits_explode_does_not_with_a_clip():
    """A learning rate far too large for the projections of the attention."""

    def train(clipping):
        model = tiny_gpt.build(policy="constant")
        inner = {f"blocks.{index}.attention": block.inner for index, block in enumerate(model.blocks)}
        optimizer = torch.optim.Adam([projection.weight for projection in inner.values()], lr=0.3)
        tops, losses = [], []
        with QKClip(model, tau=20.0, projections=inner, monitoring_only=not clipping) as clip:
            for step in range(60):
                optimizer.zero_grad()
                loss = model.loss(tiny_gpt.batch(step % 4))
                loss.backward()
                optimizer.step()
                tops.append(max((clipped.max_logit for clipped in clip.step()), default=0.0))
                losses.append(loss.item())
        return max(tops), losses[0], sum(losses[-10:]) / 10

    top, first, last = train(clipping=False)
    assert top > 1000
    assert last > first + 0.2
    top, first, last = train(clipping=True)
    assert top < 3 * 20  # a step may go beyond τ
    assert last < first - 0.1


def clipped_by(mode):
    """The reports and the weights of a model trained by a parallel method."""
    run = Run(mode, "log", packed=False)
    found = []
    with QKClip(run.model, tau=0.3, projections={"block.attention": (run.model.block.qkv, "by_head")}) as clip:
        for step in range(4):
            run.step(step)
            found.append([tuple(clipped) for clipped in clip.step()])
    return found, {name: whole(x) for name, x in run.model.state_dict().items()}


def clipped_on_rank(rank):
    return {mode: clipped_by(mode) for mode in ("ddp", "fsdp2", "tp", "cp-ring", "cp-ulysses")}


def test_processes_agree_and_shards_are_scaled_as_the_whole(tmp_path):
    expected, state = clipped_by("alone")
    assert sum(map(len, expected)) > 4
    for of_rank in on_two_ranks(clipped_on_rank, tmp_path):
        for mode, (found, of_mode) in of_rank.items():
            assert [[x[:2] for x in step] for step in found] == [[x[:2] for x in step] for step in expected], mode
            for step, other in zip(found, expected, strict=True):
                assert [x[2:] for x in step] == [pytest.approx(x[2:], rel=1e-5) for x in other]
            for name, x in of_mode.items():
                torch.testing.assert_close(x, state[name], rtol=1e-5, atol=1e-6)


def test_a_module_of_unknown_projections_that_calls_torch_is_refused_at_each_step():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in self.project(x).chunk(3, dim=-1))
            return F.scaled_dot_product_attention(q, k, v)

    model, x = nn.Sequential(Odd()), torch.randn(1, 8, 16)
    with QKClip(model) as clip:
        for _ in range(2):
            model(x)
            with pytest.raises(ArgumentError, match="projections"):
                clip.step()
    with QKClip(model, tau=1e-3, projections={"0": model[0].project}) as clip:
        model(x)
        assert [clipped.layer for clipped in clip.step()] == ["0"] * 4
    with QKClip(model, tau=1e-3, projections={"0": None}) as clip:
        model(x)
        assert clip.step() == []
