"""A monitor measures calls of torch's own attention function in any model, under the paths of its modules."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from ranks import on_two_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import Monitor
from attnscale.errors import MonitorWarning

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # inside torch.compile

WIDTH, HEADS = 16, 2
TORCHS = (F.scaled_dot_product_attention,)  # in a tuple: a patch replaces plain names


@pytest.fixture(autouse=True)
def torch_is_restored() -> Iterator[None]:
    yield
    if F.scaled_dot_product_attention is not TORCHS[0]:
        gc.collect()  # a monitor of a failed test
    assert F.scaled_dot_product_attention is TORCHS[0]
    assert scaled_dot_product_attention is TORCHS[0]


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class NanoAttention(nn.Module):
    """As CausalSelfAttention of nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part) for part in self.c_attn(x).split(WIDTH, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class TimmAttention(nn.Module):
    """As Attention of timm's vision transformer: packed projection, optional norms, a mask that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm, self.attn_drop = nn.Identity(), nn.Identity(), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj(x.transpose(1, 2).flatten(2))


def sdpa_or_flex() -> Callable[..., Tensor]:
    def sdpa_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool) -> Tensor:
        if mask is not None:
            mask = mask[:, None, :, :]
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal
        )

    return sdpa_call


class TuneAttention(nn.Module):
    """As MultiHeadAttention of torchtune: a closure made in the constructor, expanded key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.output_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self._attention_call = sdpa_or_flex()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x), 1), split(self.v_proj(x), 1)
        k, v = (y.expand(-1, HEADS, -1, -1) for y in (k, v))
        return self.output_proj(self._attention_call(q, k, v, None, 0.0, True).transpose(1, 2).flatten(2))


class ImportedByName(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(split(x), split(x), split(x), is_causal=True).transpose(1, 2).flatten(2)


class HeldByTheModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(split(x), split(x), split(x), is_causal=True).transpose(1, 2).flatten(2)


class SelfAndCross(nn.Module):
    """Two calls in one forward pass, from a method."""

    def attend(self, x: Tensor, y: Tensor, **rules: Any) -> Tensor:
        return F.scaled_dot_product_attention(split(x), split(y), split(y), **rules).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, is_causal=True) + self.attend(x, x[:, :3])


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(WIDTH), attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, *kinds: Callable[[], nn.Module], recompute: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for kind in kinds or (NanoAttention, NanoAttention))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.recompute is None else self.repeated(block, x)
        return x

    def repeated(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


def batch(length: int = 6, seed: int = 0) -> Tensor:
    x = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def train(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Output and gradients of one step."""
    model.zero_grad()
    x.grad = None
    out = model(x) if run is None else run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def names(records: list[Any]) -> list[str]:
    return list(dict.fromkeys(record.layer for record in records))


@pytest.mark.parametrize("kind", [NanoAttention, TimmAttention, TuneAttention, ImportedByName, HeldByTheModule])
def test_a_block_is_measured_unchanged_under_its_path(kind: Callable[[], nn.Module]) -> None:
    model, x = Model(kind, kind), batch()
    expected = [value.clone() for value in train(model, x)]
    with Monitor(model, every=2, rows=None) as monitor:
        assert monitor.layers == {}
        measured = train(model, x)
        records = monitor.step(0)
        unmeasured = train(model, x)
        assert monitor.step(1) == []
        assert list(monitor.layers) == ["blocks.0.attn", "blocks.1.attn"]
    assert same(measured, expected)
    assert same(unmeasured, expected)
    assert names(records) == ["blocks.0.attn", "blocks.1.attn"]
    assert [record.head for record in records] == [0, 1, 0, 1]
    assert {record.mode for record in records} == {"training"}
    assert all(record.backward and record.forward["visible"].rows == 12 for record in records)
    assert same(train(model, x), expected)


def test_the_numbers_are_those_of_an_attnscale_module() -> None:
    class Ours(NanoAttention):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attnscale.ScaledDotProductAttention("constant")

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split(part) for part in self.c_attn(x).split(WIDTH, dim=2))
            return self.c_proj(self.inner(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(x.shape))

    x, found = batch(), []
    for model in (Model(), Model(Ours, Ours)):
        with Monitor(model, every=1, rows=None) as monitor:
            train(model, x)
            found.append(monitor.step(0))
    for plain, ours in zip(*found, strict=True):
        assert (plain.layer + ".inner", plain.head) == (ours.layer, ours.head)
        assert (plain.forward, plain.backward, plain.scalars) == (ours.forward, ours.backward, ours.scalars)


def test_calls_of_one_forward_pass_are_numbered_and_calls_of_one_module_are_summed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAndCross()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            parts = [F.scaled_dot_product_attention(*[split(part)] * 3) for part in x.split(1, dim=1)]
            return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)

    model = Model(Twice, Loop)
    with Monitor(model, every=1, rows=None) as monitor:
        for step in range(2):
            train(model, batch())
            records = monitor.step(step)
            rows = {record.layer: record.forward["visible"] for record in records}
            loop = ["blocks.1.attn", *(f"blocks.1.attn#{number}" for number in (2, 3, 4))]
            assert list(rows) == ["blocks.0.attn.inner", "blocks.0.attn.inner#2", *loop]
            assert rows["blocks.0.attn.inner"].rows == 24  # both calls of the module
            assert (rows["blocks.0.attn.inner"].max, rows["blocks.0.attn.inner#2"].max) == (6, 3)
            assert [rows[name].rows for name in loop] == [2, 2, 2, 6]  # the last name covers the other calls


@pytest.mark.parametrize("kind", ["reentrant", "nonreentrant"])
def test_recomputed_calls_keep_their_names_and_are_counted_once(kind: str) -> None:
    x, found = batch(), []
    for recompute in (None, kind):
        model = Model(NanoAttention, SelfAndCross, recompute=recompute)
        with Monitor(model, every=1, rows=None) as monitor:
            for _ in range(2):  # micro-batches
                model(x).square().sum().backward()
            found.append(monitor.step(0))
    assert names(found[0]) == ["blocks.0.attn", "blocks.1.attn", "blocks.1.attn#2"]
    for plain, recomputed in zip(*found, strict=True):
        assert recomputed.forward["w_max"].rows == 24
        assert (plain.layer, plain.head, plain.mode) == (recomputed.layer, recomputed.head, recomputed.mode)
        assert (plain.forward, plain.backward) == (recomputed.forward, recomputed.backward)
        assert recomputed.scalars["mismatch"] == 0


class CheckpointInside(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def attend(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x: Tensor) -> Tensor:
        q = split(x)
        if self.form == "torch":
            out = checkpoint(F.scaled_dot_product_attention, q, q, q, use_reentrant=False)
        elif self.form == "method":
            out = checkpoint(self.attend, q, use_reentrant=False)
        else:
            out = checkpoint(lambda q: F.scaled_dot_product_attention(q, q, q), q, use_reentrant=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", ["torch", "method", "lambda"])
def test_a_checkpointed_function_inside_a_module_is_left_alone_with_a_warning(form: str) -> None:
    model, x = Model(lambda: CheckpointInside(form), NanoAttention), batch()
    expected = [value.clone() for value in train(model, x)]
    with Monitor(model, every=1) as monitor:
        assert same(train(model, x), expected)
        with pytest.warns(MonitorWarning, match=r"blocks\.0\.attn was not measured.*Pass a module to checkpoint"):
            assert names(monitor.step(0)) == ["blocks.1.attn"]


@pytest.mark.parametrize("recompute", [None, "nonreentrant"])
@pytest.mark.parametrize("how", ["whole", "blocks", "wrapped before", "run before"])
def test_compiled_models_are_measured_by_one_graph(how: str, recompute: str | None) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, x = Model(NanoAttention, NanoAttention, SelfAndCross, recompute=recompute), batch()
    expected = [value.clone() for value in train(model, x)]
    options: dict[str, Any] = {"backend": counter, "fullgraph": True}
    run: Callable[[Tensor], Tensor] = torch.compile(model, **options) if how.endswith("before") else model
    if how == "run before":
        train(model, x, run)
    with Monitor(model, every=2, rows=None) as monitor:
        if how == "whole":
            run = torch.compile(model, **options)
        elif how == "blocks":
            for block in model.blocks:
                block.compile(**options)
        for step in range(4):
            assert same(train(model, x, run), expected)
            records = monitor.step(step)
            layers = [f"blocks.{i}.attn" for i in range(3)] + ["blocks.2.attn#2"]
            assert names(records) == (layers if step % 2 == 0 else [])
            assert all(record.backward and record.forward["w_max"].rows == 12 for record in records)
    # Equal blocks share a graph; the graph of a model that ran before is traced again.
    assert counter.frame_count == {"blocks": 2, "run before": 2}.get(how, 1)
    assert same(train(model, x, run), expected)


def test_a_graph_break_before_the_call_keeps_the_name() -> None:
    class Broken(NanoAttention):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    model = Model(Broken, Broken)
    with Monitor(model, every=1) as monitor:
        train(model, batch(), torch.compile(model, backend="aot_eager"))
        assert names(monitor.step(0)) == ["blocks.0.attn", "blocks.1.attn"]


class Arguments(nn.Module):
    """Calls torch's function with given arguments."""

    def __init__(self, **rules: Any) -> None:
        super().__init__()
        self.rules = rules

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.rules)


BOOL = torch.ones(5, 7, dtype=torch.bool).tril(2)
LOWEST = torch.zeros(5, 7).masked_fill(~BOOL, torch.finfo(torch.float32).min)
LOWEST[0] = torch.finfo(torch.float32).min  # torch gives equal weights to a row that sees nothing
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = {
    "causal": ((2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True}, 4),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), {"enable_gqa": True}, 4),
    "bool mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": BOOL}, 4),
    "float mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": torch.randn(2, 1, 5, 7)}, 4),
    "lowest mask": ((2, 4, 5, 8), (2, 4, 7, 8), {"attn_mask": LOWEST}, 4),
    "dropout": ((2, 4, 5, 8), (2, 4, 7, 8), {"dropout_p": 0.5}, 4),
    "scale": ((2, 4, 5, 8), (2, 4, 7, 8), {"scale": 0.3}, 4),
    "three dimensions": ((4, 5, 8), (4, 7, 8), {"attn_mask": BOOL}, 1),
    "three dimensions, grouped": ((4, 5, 8), (2, 7, 8), {"enable_gqa": True}, 4),
    "two dimensions": ((5, 8), (7, 8), {}, 1),
    "windows": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), {"attn_mask": torch.randn(3, 1, 5, 7)}, 4),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_gives_torchs_bits(name: str, autocast: bool) -> None:
    shape, keys, rules, heads = CALLS[name]
    model = Arguments(**rules)
    given = [torch.randn(size, requires_grad=True) for size in (shape, keys, keys)]
    found = []
    for monitored in (False, True):
        with Monitor(model, every=1) if monitored else contextlib.nullcontext() as monitor:
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(*given)
            after = torch.rand(3)  # the generator has moved equally far
            found.append([out, after, *torch.autograd.grad(out.float().square().sum(), given)])
            records = monitor.step(0) if monitor is not None else []
    assert same(*found)
    assert [(record.layer, record.head) for record in records] == [("Arguments", head) for head in range(heads)]
    assert all(record.backward for record in records)


@pytest.mark.parametrize("shapes", [((2, 2, 4, 8), (1, 2, 4, 8)), ((2, 2, 4, 8), (2, 3, 4, 8))])
def test_what_cannot_be_measured_is_left_to_torch(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    q, k = (torch.randn(shape) for shape in shapes)
    results = []
    for monitored in (False, True):
        model = Arguments()
        with Monitor(model, every=1) if monitored else contextlib.nullcontext() as monitor:
            try:
                results.append(model(q, k, k))
            except RuntimeError as error:
                results.append((type(error), str(error)))
            if monitor is not None:
                with pytest.warns(MonitorWarning, match="was not measured"):
                    assert monitor.step(0) == []
    if isinstance(results[0], Tensor):
        assert torch.equal(*results)
    else:
        assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch() -> None:
    sequences = torch.nested.nested_tensor([torch.randn(4, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged)
    q = sequences.transpose(1, 2)
    model = Arguments()
    expected = model(q, q, q)
    with Monitor(model, every=1) as monitor:
        assert torch.equal(model(q, q, q).values(), expected.values())
        with pytest.warns(MonitorWarning, match="nested tensor"):
            monitor.step(0)


def test_models_with_both_kinds_of_attention_are_measured_in_the_order_of_the_model() -> None:
    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attnscale.MultiheadAttention(WIDTH, HEADS, batch_first=True, policy="log")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=False)[0]

    model = Model(NanoAttention, Ours, NanoAttention)
    with Monitor(model, every=1) as monitor:
        assert list(monitor.layers) == ["blocks.1.attn.inner"]
        train(model, batch())
        records = monitor.step(0)
        assert names(records) == list(monitor.layers) == ["blocks.0.attn", "blocks.1.attn.inner", "blocks.2.attn"]


def test_a_transformers_model_beside_an_own_block_is_measured() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(vocab_size=8, n_embd=WIDTH, n_layer=1, n_head=HEADS)
            self.gpt, self.head = transformers.GPT2Model(config), Block(NanoAttention)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gpt(inputs_embeds=x).last_hidden_state)

    model = Both()
    with Monitor(model, every=1) as monitor:
        train(model, batch())
        records = monitor.step(0)
    assert names(records) == ["gpt.h.0.attn", "head.attn"]
    assert {record.forward["visible"].rows for record in records} == {12}


@pytest.mark.parametrize(
    "model", [nn.MultiheadAttention(16, 2), nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2), 1)]
)
def test_unconverted_multihead_attention_is_refused_with_the_remedy(model: nn.Module) -> None:
    with pytest.raises(attnscale.ArgumentError, match=r'attnscale\.convert\(model, "constant"\)'):
        Monitor(model)
    attnscale.convert(model, "constant")
    Monitor(model).close()


def test_unconverted_attention_beside_other_attention_is_reported_with_the_remedy() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.pool = attnscale.ScaledDotProductAttention(), nn.MultiheadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(x, x, x)[0] + self.ours(x, x, x)

    model = Pooled()
    with Monitor(model, every=1) as monitor:
        train(model, batch())
        with pytest.warns(MonitorWarning, match=r"pool was not measured.*attnscale\.convert\(model, \"constant\"\)"):
            assert names(monitor.step(0)) == ["ours"]


def test_a_model_that_cannot_call_attention_is_refused() -> None:
    with pytest.raises(attnscale.ArgumentError, match="expected a model"):
        Monitor(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_own_softmax_is_reported_with_the_remedy_once() -> None:
    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.mT, -1) @ x

    model = Model(Softmax)
    with Monitor(model, every=1) as monitor:
        assert monitor.step(0) == []  # it has not run
        train(model, batch())
        with pytest.warns(
            MonitorWarning, match=r"called torch\.nn\.functional\.scaled_dot_product_attention\. Call it"
        ):
            assert monitor.step(0) == []
        train(model, batch())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.step(1)


def test_a_compiled_model_without_calls_is_reported_with_reset() -> None:
    model = Model(nn.Identity)
    model.compile(backend="eager")
    with Monitor(model, every=1) as monitor:
        train(model, batch())
        with pytest.warns(MonitorWarning, match=r"torch\.compiler\.reset\(\)"):
            monitor.step(0)


@pytest.mark.parametrize("first", ["patch", "monitor"])
def test_patch_torch_and_a_monitor_work_together_in_any_order(first: str) -> None:
    model, x = Model(NanoAttention, SelfAndCross), batch()
    law = {"name": "log", "reference_length": 2}
    with attnscale.patch_torch(law):
        expected = [value.clone() for value in train(model, x)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(attnscale.patch_torch(law)) if first == "patch" else None
        monitor = stack.enter_context(Monitor(model, every=1, rows=None))
        patch = patch or stack.enter_context(attnscale.patch_torch(law))
        assert same(train(model, x), expected)
        records = monitor.step(0)
        assert names(records) == ["blocks.0.attn", "blocks.1.attn", "blocks.1.attn#2"]
        assert records[0].forward["beta"].max > 2
        patch.remove()
        train(model, x)
        assert {record.forward["beta"].max for record in monitor.step(1)} == {1.0}


def test_weights_under_patch_torch_are_returned_beneath_a_monitor() -> None:
    stock, model, x = nn.MultiheadAttention(WIDTH, HEADS), Model(), torch.randn(5, 1, WIDTH)
    with attnscale.patch_torch("log"):
        expected = stock(x, x, x)
        with Monitor(model):
            found = stock(x, x, x)
    assert torch.equal(found[1], expected[1])


def test_two_models_with_a_monitor_each_do_not_mix_and_may_be_closed_in_any_order() -> None:
    one, other, x = Model(), Model(NanoAttention), batch()
    first, second = Monitor(one, every=1, rows=None), Monitor(other, every=1, rows=None)
    train(one, x)
    train(other, batch(length=4))
    F.scaled_dot_product_attention(x, x, x)  # of neither
    for monitor, layers, length in ((first, 2, 6), (second, 1, 4)):
        records = monitor.step(0)
        assert names(records) == [f"blocks.{i}.attn" for i in range(layers)]
        assert {record.forward["visible"].max for record in records} == {length}
    first.close()
    train(one, x)
    train(other, x)
    assert names(second.step(1)) == ["blocks.0.attn"]
    second.close()


def test_a_second_monitor_of_the_same_modules_is_refused_and_changes_nothing() -> None:
    model = Model()
    with Monitor(model, every=1) as monitor:
        for refused in (model, model.blocks[0]):
            with pytest.raises(attnscale.ArgumentError, match="close the other monitor first"):
                Monitor(refused)
        train(model, batch())
        assert names(monitor.step(0)) == ["blocks.0.attn", "blocks.1.attn"]
    Monitor(model).close()


def test_threads_do_not_see_each_others_modules() -> None:
    model, foreign = Model(), Model()
    inside, outside = threading.Event(), threading.Event()

    class Waiting(NanoAttention):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert outside.wait(60)
            return super().forward(x)

    model.blocks[0].attn = Waiting()

    def run_foreign() -> None:
        assert inside.wait(60)
        train(foreign, batch(length=4))
        outside.set()

    with Monitor(model, every=1, rows=None) as monitor:
        thread = threading.Thread(target=run_foreign)
        thread.start()
        train(model, batch())
        thread.join()
        records = monitor.step(0)
    assert names(records) == ["blocks.0.attn", "blocks.1.attn"]
    assert {record.forward["visible"].rows for record in records} == {12}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_forward_pass_leaves_nothing_behind(error: type[BaseException]) -> None:
    class Failing(NanoAttention):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise error
            return super().forward(x)

    model, x = Model(NanoAttention, Failing), batch()
    with Monitor(model, every=1, rows=None) as monitor:
        model.blocks[1].attn.fails = True
        with pytest.raises(error):
            model(x)
        q = torch.randn(1, 7, 5, 8)
        F.scaled_dot_product_attention(q, q, q)  # of no module
        model.blocks[1].attn.fails = False
        train(model, x)
        records = monitor.step(0)
    assert names(records) == ["blocks.0.attn", "blocks.1.attn"]
    assert [record.head for record in records] == [0, 1, 0, 1]


def test_a_call_after_the_failure_of_a_submodule_has_the_name_of_its_own_module() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class FallsBack(ImportedByName):
        def __init__(self) -> None:
            super().__init__()
            self.fast = Raises()

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                return self.fast(x)
            return super().forward(x)

    model = Model(FallsBack)
    with Monitor(model, every=1) as monitor:
        train(model, batch())
        assert names(monitor.step(0)) == ["blocks.0.attn"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_monitored_model_is_not_measured(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, x = Model(NanoAttention, HeldByTheModule), batch()
    expected, keys = [value.clone() for value in train(model, x)], list(model.state_dict())
    with Monitor(model, every=1, rows=None) as monitor:
        assert list(model.state_dict()) == keys
        other = copied(model)
        assert same(train(other, x), expected)
        assert same(train(model, x), expected)
        assert {record.forward["visible"].rows for record in monitor.step(0)} == {12}
        with Monitor(other, every=1) as second:  # the copy can be monitored by itself
            train(other, x)
            assert names(second.step(0)) == ["blocks.0.attn", "blocks.1.attn"]
    assert same(train(other, x), expected)


def test_a_pickled_model_can_be_loaded_without_attnscale() -> None:
    script = textwrap.dedent(
        """
        import pickle, sys
        sys.modules["attnscale"] = None
        enter, leave = pickle.loads(bytes.fromhex(sys.argv[1]))
        assert enter(1, 2) is None and leave(1, 2, 3) is None
        """
    )
    model = Model(NanoAttention)
    with Monitor(model):
        attention = model.blocks[0].attn
        hooks = [*attention._forward_pre_hooks.values(), *attention._forward_hooks.values()]
        saved = pickle.dumps(hooks).hex()
    subprocess.run([sys.executable, "-c", script, saved], check=True)


def test_closing_restores_hooks_and_references_exactly() -> None:
    model = Model(NanoAttention, HeldByTheModule)
    handle = model.blocks[0].attn.register_forward_hook(lambda *_: None)

    def hooks() -> list[object]:
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")
        return [dict(getattr(module, kind)) for module in model.modules() for kind in kinds]

    before = hooks()
    monitor = Monitor(model)
    assert hooks() != before
    late = type(sys)("imported_later")
    exec("from torch.nn.functional import scaled_dot_product_attention as attend", vars(late))
    sys.modules["imported_later"] = late
    try:
        monitor.close()
    finally:
        del sys.modules["imported_later"]
    assert hooks() == before
    assert model.blocks[1].attn.attend is late.attend is TORCHS[0]
    handle.remove()


def test_a_monitor_that_is_dropped_restores_torch_and_the_model() -> None:
    model = Model()
    model.monitor = Monitor(model, every=1)  # a reference cycle
    hooked = model.blocks[0].attn
    del model.monitor
    gc.collect()
    assert F.scaled_dot_product_attention is TORCHS[0]
    assert not hooked._forward_pre_hooks


def test_validation_is_not_mixed_into_training() -> None:
    model = Model()
    with Monitor(model, every=1, rows=None) as monitor:
        train(model, batch())
        with torch.no_grad():
            model.eval()(batch(length=9))
        model.train()
        assert {record.forward["visible"].max for record in monitor.step(0)} == {6}
        with torch.no_grad():
            model.eval()(batch(length=9))
        assert {(record.mode, record.forward["visible"].max) for record in monitor.step(1)} == {("evaluation", 9)}


def called_in_one_process(rank: int) -> dict[str, Any]:
    """Records of a model whose processes call different blocks, wrapped in DistributedDataParallel."""

    class Chosen(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: 1 + rank]:
                x = block(x)
            return x

    model = nn.parallel.DistributedDataParallel(Chosen(), find_unused_parameters=True)
    with Monitor(model, every=1, rows=None) as monitor:
        for step in range(2):
            train(model, batch(seed=rank))
            records = monitor.step(step)
        return {"rows": {record.layer: record.forward["visible"].rows for record in records}}


def test_layers_that_only_some_processes_call_are_merged_by_name(tmp_path: Path) -> None:
    for found in on_two_ranks(called_in_one_process, tmp_path):
        assert found["rows"] == {"module.blocks.0.attn": 24, "module.blocks.1.attn": 12}


def test_observe_takes_the_same_models() -> None:
    model = Model()
    with attnscale.observe(model) as observed:
        train(model, batch())
    assert [(record.layer, record.head) for record in observed.records][:2] == [
        ("blocks.0.attn", 0),
        ("blocks.0.attn", 1),
    ]
