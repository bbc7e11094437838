"""Replacing torch's attention by ours does not recurse, and `patch_torch` does it everywhere and undoes it exactly."""

import pickle
import sys
import threading
import types

import pytest
import torch
from oracle import tensors
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

import attnscale

# In a tuple: as plain names of this module a patch would replace them too.
ORIGINAL = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
LAW = {"name": "log", "reference_length": 2}


def test_assigning_our_function_does_not_recurse(monkeypatch):
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scaled = attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")
    monkeypatch.setattr(F, "scaled_dot_product_attention", attnscale.scaled_dot_product_attention)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    assert torch.equal(attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy="log"), scaled)


def test_what_others_put_in_its_place_is_still_asked(monkeypatch):
    # Context parallelism replaces the function to reach the keys of other ranks.
    asked = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: asked.append(1) or ORIGINAL[0](*a, **k))
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    with attnscale.patch_torch(LAW):
        F.scaled_dot_product_attention(q, k, v)
    attnscale.scaled_dot_product_attention(q, k, v)
    assert asked == [1, 1]


def test_a_patch_gives_a_policy_and_is_undone_to_the_object():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    with attnscale.patch_torch("log", reference_length=2) as patch:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert F.scaled_dot_product_attention is not ORIGINAL[0]
        direct = attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy=LAW)
        assert torch.equal(out, direct)  # so that an explicit policy is not applied twice either
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    patch.remove()
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert torch.backends.mha.get_fastpath_enabled()
    undo = attnscale.patch_torch(LAW)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), direct)
    undo.remove()
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_a_patch_that_fails_leaves_nothing():
    with pytest.raises(attnscale.AttnScaleError):
        attnscale.patch_torch("logg")
    assert F.scaled_dot_product_attention is ORIGINAL[0]


def test_functions_imported_by_name_are_reached_and_restored(monkeypatch):
    theirs = types.ModuleType("their_model")
    theirs.attention = ORIGINAL[0]
    monkeypatch.setitem(sys.modules, "their_model", theirs)
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    with attnscale.patch_torch(LAW):
        expected = attnscale.scaled_dot_product_attention(q, k, v, policy=LAW)
        assert torch.equal(theirs.attention(q, k, v), expected)
    assert theirs.attention is ORIGINAL[0]


def test_patches_may_be_removed_in_any_order():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    first = attnscale.patch_torch(LAW)
    second = attnscale.patch_torch("sqrt_log")
    first.remove()
    expected = attnscale.scaled_dot_product_attention(q, k, v, policy="sqrt_log")
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.remove()
    assert F.scaled_dot_product_attention is ORIGINAL[0]
    assert F.multi_head_attention_forward is ORIGINAL[1]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["none", "causal", "padding", "both"])
@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention_of_torch_gets_the_policy_with_and_without_weights(need_weights, masked, batched):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    ours = attnscale.MultiheadAttention(16, 4, batch_first=True, policy=LAW).double().eval()
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64) if batched else torch.randn(5, 16, dtype=torch.float64)
    rules = {"need_weights": need_weights}
    if masked in ("causal", "both"):
        rules |= {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True}
    if masked in ("padding", "both"):
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        rules["key_padding_mask"] = padding if batched else padding[1]
    before = stock(x, x, x, **rules)
    with torch.no_grad(), attnscale.patch_torch(LAW):
        out, weights = stock(x, x, x, **rules)
        per_head = stock(x, x, x, **rules, average_attn_weights=False)[1]
    expected, expected_weights = ours(x, x, x, **rules)
    torch.testing.assert_close(out, expected.detach())
    if need_weights:
        torch.testing.assert_close(weights, expected_weights.detach())
        torch.testing.assert_close(per_head.mean(-3), weights)
        assert (weights - before[1]).abs().max() > 1e-3
    else:
        assert weights is None
    again = stock(x, x, x, **rules)
    assert torch.equal(again[0], before[0])


def test_the_fused_path_of_encoders_does_not_skip_the_policy():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        stock = model(x)
        with attnscale.patch_torch(LAW):
            patched = model(x)
        with attnscale.convert(model, LAW):
            converted = model(x)
        torch.testing.assert_close(patched, converted, rtol=1e-4, atol=1e-5)
        assert (patched - stock).abs().max() > 1e-3
        assert torch.equal(model(x), stock)


def test_threads_that_want_weights_do_not_get_each_others():
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    inputs = [torch.randn(1, 4 + i, 16) for i in range(4)]
    found: dict[int, list] = {i: [] for i in range(4)}

    def work(i):
        with torch.no_grad():
            found[i] = [stock(inputs[i], inputs[i], inputs[i])[1] for _ in range(20)]

    with attnscale.patch_torch(LAW):
        with torch.no_grad():
            expected = [stock(x, x, x)[1] for x in inputs]
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, weights in found.items():
        assert len(weights) == 20
        assert max((one - expected[i]).abs().max().item() for one in weights) < 1e-6


def test_a_constant_patch_changes_nothing_of_torch():
    torch.manual_seed(0)
    q, k, v = tensors((2, 4, 5, 8), (2, 4, 9, 8), torch.float32)
    expected = [
        ORIGINAL[0](q, k, v),
        ORIGINAL[0](q, k, v, causal_lower_right(5, 9)),
        ORIGINAL[0](q, k[:, :1], v[:, :1]),
    ]
    with attnscale.patch_torch("constant"):
        assert F.multi_head_attention_forward is ORIGINAL[1]
        assert torch.backends.mha.get_fastpath_enabled()
        got = [
            F.scaled_dot_product_attention(q, k, v),
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(5, 9)),
            F.scaled_dot_product_attention(q, k[:, :1], v[:, :1]),
        ]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_compiled_code_gets_the_policy_too():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8), torch.float32)
    with attnscale.patch_torch(LAW):
        compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x), backend="eager", fullgraph=True)
        got = compiled(q, k, v)
    torch.testing.assert_close(got, attnscale.scaled_dot_product_attention(q, k, v, policy=LAW))


class Logged(torch.Tensor):
    """A subclass that answers for torch's attention itself."""

    @classmethod
    def __torch_function__(cls, func, kinds, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return "theirs"
        return super().__torch_function__(func, kinds, args, kwargs or {})


@pytest.mark.parametrize("policy", ["constant", LAW], ids=str)
def test_whoever_overrides_torchs_function_is_still_asked(policy):
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8), torch.float32)
    with attnscale.patch_torch(policy):
        assert F.scaled_dot_product_attention(q.as_subclass(Logged), k, v) == "theirs"
        assert F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(6, 6).as_subclass(Logged)) == "theirs"
        plain = F.scaled_dot_product_attention(q, k, v)
        parameter = nn.Parameter(q)
        assert torch.equal(F.scaled_dot_product_attention(parameter, k, v), plain)


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_it_is_found_by_name_pickled_and_recorded_as_torchs():
    x = torch.randn(1, 2, 6, 8)
    with attnscale.patch_torch(LAW):
        function = F.scaled_dot_product_attention
        assert (function.__module__, function.__name__) == ("torch.nn.functional", "scaled_dot_product_attention")
        saved = pickle.dumps(function)
        assert pickle.loads(saved) is function
        traced = torch.fx.symbolic_trace(Attends())
        assert torch.equal(traced(x), Attends()(x))
    assert pickle.loads(saved) is ORIGINAL[0]


def test_a_wrapper_put_on_top_of_a_patch_does_not_recurse(monkeypatch):
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    with attnscale.patch_torch(LAW) as patch:
        expected = F.scaled_dot_product_attention(q, k, v)
        below = F.scaled_dot_product_attention
        with monkeypatch.context() as theirs:
            theirs.setattr(F, "scaled_dot_product_attention", lambda *a, **k: below(*a, **k))
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
            assert torch.equal(attnscale.scaled_dot_product_attention(q, k, v, policy=LAW), expected)
            patch.remove()  # beneath the other, where it passes calls on from now on
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), ORIGINAL[0](q, k, v))
    F.scaled_dot_product_attention = ORIGINAL[0]  # what monkeypatch put back is the patch, which passes calls on


def test_a_mask_of_a_length_that_only_the_data_knows_is_exported():
    class Chosen(nn.Module):
        def forward(self, x):
            q = x[x.sum((1, 2, 3)) != 0]
            return F.scaled_dot_product_attention(q, q, q, torch.ones(q.shape[0], 1, 1, 1, dtype=torch.bool))

    x = torch.randn(2, 4, 8, 8)
    with attnscale.patch_torch("constant"):
        program = torch.export.export(Chosen(), (x,)).module()
    assert torch.equal(program(x), Chosen()(x))
