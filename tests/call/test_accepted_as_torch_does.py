"""Shapes, numbers, wrappers and exceptions of torch's attention are ours too."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracle import tensors
from torch import nn
from torch.nn import functional as F

import attnscale
from attnscale import attention_with_stats, scaled_dot_product_attention
from attnscale.errors import ArgumentTypeError, AttnScaleError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

SHAPES = {
    "one key head": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "one value head": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 1, 6, 8)),
    "one query head": ((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "keys without a batch": ((2, 4, 5, 8), (4, 6, 8), (4, 6, 8)),
    "keys without heads": ((2, 4, 5, 8), (6, 8), (6, 8)),
    "queries without a batch": ((4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "queries without heads": ((5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "three numbers of dimensions": ((3, 2, 4, 5, 8), (4, 6, 8), (6, 8)),
    "one sequence of keys": ((2, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
    "two dimensions": ((5, 8), (6, 8), (6, 8)),
    "three dimensions": ((3, 5, 8), (3, 6, 8), (1, 6, 8)),
}


def inputs(shapes, dtype=torch.float64):
    return [tensors(shape, shape, dtype, seed=i)[0] for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_leading_dimensions_broadcast_as_in_torch(shapes):
    q, k, v = inputs(shapes)
    expected = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(7)) > 0.3
    masked = F.scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(scaled_dot_product_attention(q, k, v, mask), masked)
    for policy, backend in itertools.product(("constant", "log"), ("auto", "blockwise", "reference")):
        doubled = {"name": "constant", "beta": 2.0} if policy == "constant" else policy
        out = scaled_dot_product_attention(q, k, v, mask, policy=doubled, backend=backend)
        beta = 2.0 if policy == "constant" else mask.sum(-1).clamp(min=2).double().log()[:, None]
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q * beta, k, v, mask), rtol=1e-6, atol=1e-7)
    output, stats = attention_with_stats(q, k, v, mask)
    torch.testing.assert_close(output, masked)
    assert stats.entropy.shape == masked.shape[:-1]


@pytest.mark.parametrize("shapes", list(SHAPES.values())[:4], ids=list(SHAPES)[:4])
@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_gradients_of_broadcast_inputs_are_summed_over_what_they_serve(shapes, backend):
    leaves = [x.requires_grad_() for x in inputs(shapes)]
    ours = scaled_dot_product_attention(*leaves, policy={"name": "constant", "beta": 2.0}, backend=backend)
    torchs = F.scaled_dot_product_attention(leaves[0] * 2, *leaves[1:])
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(torchs.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_grouped_keys_without_a_batch_are_grouped():
    q, k, v = inputs(((2, 4, 5, 8), (2, 6, 8), (2, 6, 8)))
    expected = F.scaled_dot_product_attention(q * 2, k, v, enable_gqa=True)
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True, policy={"name": "constant", "beta": 2.0})
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("policy", ["constant", "log"])
@pytest.mark.parametrize("value", [torch.tensor(0.5), np.float32(0.5), np.float64(0.5)], ids=["tensor", "fp32", "fp64"])
def test_numbers_may_be_tensors_and_numpys(policy, value):
    q, k, v = tensors((2, 4, 5, 8), (2, 4, 6, 8))
    expected = scaled_dot_product_attention(q, k, v, scale=0.5, policy=policy)
    assert torch.equal(scaled_dot_product_attention(q, k, v, scale=value, policy=policy), expected)
    capped = scaled_dot_product_attention(q, k, v, softcap=value, policy=policy)
    assert torch.equal(capped, scaled_dot_product_attention(q, k, v, softcap=0.5, policy=policy))
    assert torch.equal(scaled_dot_product_attention(q, k, v, scale=2, policy=policy),
                       scaled_dot_product_attention(q, k, v, scale=2.0, policy=policy))  # fmt: skip


@pytest.mark.parametrize("policy", ["constant", "log"])
@pytest.mark.parametrize(
    ("arguments", "kwargs", "also"),
    [
        ((torch.zeros(8),) * 3, {}, RuntimeError),
        ((torch.zeros(2, 3, 8), torch.zeros(2, 3, 8).double(), torch.zeros(2, 3, 8)), {}, RuntimeError),
        ((torch.zeros(2, 3, 8), torch.zeros(2, 3, 7), torch.zeros(2, 3, 8)), {}, RuntimeError),
        ((torch.zeros(2, 3, 8), torch.zeros(3, 3, 8), torch.zeros(3, 3, 8)), {}, RuntimeError),
        ((torch.zeros(2, 3, 8).int(),) * 3, {}, RuntimeError),
        ((torch.zeros(4, 3, 8), torch.zeros(3, 3, 8), torch.zeros(3, 3, 8)), {"enable_gqa": True}, RuntimeError),
        ((torch.zeros(2, 3, 8),) * 3, {"dropout_p": 1.5}, RuntimeError),
        ((torch.zeros(2, 3, 8),) * 3, {"attn_mask": torch.ones(3, 3).int()}, RuntimeError),
        ((torch.zeros(2, 3, 8),) * 3, {"attn_mask": torch.ones(4, 3) > 0}, RuntimeError),
        ((torch.zeros(2, 3, 8), torch.zeros(2, 3, 8, device="meta"), torch.zeros(2, 3, 8)), {}, RuntimeError),
        ((torch.zeros(2, 3, 8),) * 3, {"scale": "big"}, TypeError),
        ((torch.zeros(2, 3, 8),) * 3, {"scale": torch.tensor(1.0, requires_grad=True)}, TypeError),
        ((torch.zeros(2, 3, 8),) * 3, {"is_causal": 1}, TypeError),
        ((None, torch.zeros(2, 3, 8), torch.zeros(2, 3, 8)), {}, TypeError),
    ],
)  # fmt: skip
def test_a_mistake_raises_ours_and_the_kind_that_torch_raises(policy, arguments, kwargs, also):
    with pytest.raises(also):
        F.scaled_dot_product_attention(*arguments, **kwargs)
    with pytest.raises(also) as raised:
        scaled_dot_product_attention(*arguments, policy=policy, **kwargs)
    assert isinstance(raised.value, AttnScaleError)
    assert isinstance(raised.value, (ValueError, TypeError))


def jagged(lengths, heads=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randn(length, heads, 8, generator=generator, dtype=dtype) for length in lengths]
    return torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("policy", ["log", {"name": "constant", "beta": 2.0}], ids=str)
def test_jagged_tensors_are_their_sequences_one_by_one(causal, policy):
    leaf = jagged((5, 2, 7))
    x = leaf.transpose(1, 2)
    out = scaled_dot_product_attention(x, x, x, is_causal=causal, policy=policy)
    assert out.is_nested
    assert out.layout == torch.jagged
    alone = [y.transpose(0, 1)[None].detach().requires_grad_() for y in leaf.unbind()]
    expected = [scaled_dot_product_attention(y, y, y, is_causal=causal, policy=policy) for y in alone]
    for got, want in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(got, want[0])
    (gradient,) = torch.autograd.grad(out.values().square().sum(), leaf)
    for got, y, want in zip(gradient.unbind(), alone, expected, strict=True):
        torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), y)[0][0].transpose(0, 1))


def test_jagged_queries_and_keys_may_have_different_lengths():
    q, k = jagged((2, 1, 3)).transpose(1, 2), jagged((5, 2, 7), seed=1).transpose(1, 2)
    out = scaled_dot_product_attention(q, k, k, policy="log")
    for got, one, keys in zip(out.unbind(), q.unbind(), k.unbind(), strict=True):
        torch.testing.assert_close(
            got, scaled_dot_product_attention(one[None], keys[None], keys[None], policy="log")[0]
        )
    with pytest.raises(AttnScaleError, match="is_causal"):
        scaled_dot_product_attention(q, k, k, policy="log", is_causal=True)


def test_with_constant_temperature_nested_tensors_are_torchs():
    x = jagged((5, 2, 7)).transpose(1, 2)
    out, expected = scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(out.values(), expected.values())


def test_nested_tensors_that_cannot_be_taken_are_refused_in_words():
    x = jagged((5, 2)).transpose(1, 2)
    dense = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    strided = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 2, 8)])
    with pytest.raises(ArgumentTypeError, match=r"layout=torch.jagged"):
        scaled_dot_product_attention(strided, strided, strided, policy="log")
    with pytest.raises(ArgumentTypeError, match=r"key as a torch.strided tensor"):
        scaled_dot_product_attention(x, dense, dense, policy="log")
    with pytest.raises(ArgumentTypeError, match="key as a nested tensor is not accepted here"):
        scaled_dot_product_attention(dense, x, x, policy="log")
    with pytest.raises(ArgumentTypeError, match="attn_mask"):
        scaled_dot_product_attention(x, x, x, torch.ones(5, 5) > 0, policy="log")
    with pytest.raises(ArgumentTypeError, match="query as a nested tensor is not accepted here"):
        attention_with_stats(x, x, x)


@pytest.mark.parametrize("order", ["own", "convert first", "lora first"])
def test_lora_on_multihead_attention_trains_and_merges(order):
    peft = pytest.importorskip("peft", reason="peft needs Python 3.11")
    torch.manual_seed(0)
    law = {"name": "log", "reference_length": 2}

    class Model(nn.Module):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    if order == "own":
        model = Model(attnscale.MultiheadAttention(16, 4, batch_first=True, policy=law))
    else:
        model = Model(nn.MultiheadAttention(16, 4, batch_first=True))
    x = torch.randn(2, 5, 16)
    if order == "convert first":
        attnscale.convert(model, law)
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["attention"], init_lora_weights=False))
    if order == "lora first":
        attnscale.convert(tuned, law)
    out = tuned(x)
    out.square().sum().backward()
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(merged(x), out, rtol=1e-4, atol=1e-5)
    expected = attnscale.MultiheadAttention(16, 4, batch_first=True, policy=law)
    expected.load_state_dict(merged.attention.state_dict())
    torch.testing.assert_close(expected(x, x, x)[0], out, rtol=1e-4, atol=1e-5)


def test_an_exported_program_with_our_operators_needs_our_import(tmp_path):
    class Capped(nn.Module):
        def forward(self, q):
            return scaled_dot_product_attention(q, q, q, is_causal=True, policy="log", softcap=5.0)

    q = torch.randn(1, 2, 6, 8)
    program = torch.export.export(Capped(), (q,))
    torch.export.save(program, tmp_path / "program.pt2")
    load = f"import torch; torch.export.load({str(tmp_path / 'program.pt2')!r})"
    without = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "attnscale" in without.stderr
    loaded = torch.export.load(tmp_path / "program.pt2")  # here, where attnscale is imported
    torch.testing.assert_close(loaded.module()(q), Capped()(q))
    torch.testing.assert_close(program.module()(q), Capped()(q))
