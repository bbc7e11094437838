"""`patch_torch` and `torch.jit.script`: refused inside without a trace, or compiled to torch's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attnscale

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")

Q = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(0))


def attending() -> nn.Module:
    # A class of its own for every call: torch keeps what it has compiled of a class.
    class Attending(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)

    return Attending()


def enclosing() -> nn.Module:
    class Enclosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inside, self.after = nn.ReLU(), attending(), nn.ReLU()

        def forward(self, q):
            return self.after(self.inside(self.before(q)))

    return Enclosing()


def holding() -> nn.Module:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = F.scaled_dot_product_attention

        def forward(self, q):
            return self.attend(q, q, q)

    return Holding()


def function() -> Callable[..., Any]:
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    return attend


def with_weights() -> nn.Module:
    class WithWeights(nn.MultiheadAttention):
        pass

    return WithWeights(8, 2)


@pytest.mark.parametrize("make", [attending, enclosing, function, with_weights])
def test_scripting_under_a_policy_is_refused_and_works_afterwards(make: Callable[[], Any]) -> None:
    thing = make()
    with attnscale.patch_torch("log"):
        for _ in range(2):
            with pytest.raises(attnscale.BackendError, match=r"torch\.jit\.script cannot compile .*patch_torch\(Log\("):
                torch.jit.script(thing)
    scripted = torch.jit.script(thing)
    assert "attnscale" not in str(scripted.inlined_graph)
    x = (torch.randn(5, 1, 8),) * 3 if isinstance(thing, nn.MultiheadAttention) else (Q,)
    for found, expected in zip(scripted(*x), thing(*x), strict=True):
        assert torch.equal(found, expected)


def test_a_function_held_by_a_module_is_scripted_as_before_after_removal() -> None:
    module = holding()
    with attnscale.patch_torch("log"):
        with pytest.raises(RuntimeError, match="patch_torch"):
            torch.jit.script(holding())
        late = holding()
    for held in (module, late):
        expected = F.scaled_dot_product_attention(Q, Q, Q)
        assert torch.equal(torch.jit.script(held)(Q), expected)


@pytest.mark.parametrize("make", [attending, enclosing, function, with_weights])
def test_scripting_at_beta_one_compiles_torchs_own_function(make: Callable[[], Any]) -> None:
    thing = make()
    with attnscale.patch_torch("constant"):
        scripted = torch.jit.script(thing)
    assert "aten::scaled_dot_product_attention" in str(scripted.inlined_graph)
    x = (torch.randn(5, 1, 8),) * 3 if isinstance(thing, nn.MultiheadAttention) else (Q,)
    for found, expected in zip(scripted(*x), thing(*x), strict=True):
        assert torch.equal(found, expected)


def test_the_patch_on_top_decides_whether_scripting_is_refused() -> None:
    with attnscale.patch_torch("log"), attnscale.patch_torch("constant") as inner:
        assert torch.equal(torch.jit.script(attending())(Q), attending()(Q))
        inner.remove()
        with pytest.raises(attnscale.BackendError, match="patch_torch"):
            torch.jit.script(attending())


def test_what_has_nothing_to_do_with_attention_is_scripted_under_a_policy() -> None:
    def double(x):
        return 2 * x

    with attnscale.patch_torch("log"):
        assert torch.equal(torch.jit.script(double)(Q), 2 * Q)
