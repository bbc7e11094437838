"""What is remembered is made by ordinary calls only, is bounded, and may be used by any thread."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref

import pytest
import torch
from oracle import tensors
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from attnscale import (
    LengthPolicy,
    StatsRequest,
    attention_with_stats,
    build_policy,
    scaled_dot_product_attention,
)
from attnscale._util import state
from attnscale._util.memory import MOST_ELEMENTS, Memory
from attnscale.policies import FormulaPolicy
from attnscale.policies.temperature import mark_counted

KINDS = {
    "causal": lambda q, policy: scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy),
    "one row": lambda q, policy: scaled_dot_product_attention(q[:, :, :1], q, q, policy=policy),
    "statistics": lambda q, policy: attention_with_stats(q, q, q, is_causal=True, policy=policy).output,
    "sampled": lambda q, policy: (
        attention_with_stats(q, q, q, is_causal=True, policy=policy, request=StatsRequest(rows=4)).stats.entropy
    ),
}


LENGTHS = itertools.count(11)


def fresh_length() -> int:
    """A length that no memory has met."""
    return next(LENGTHS)


def query(length: int) -> Tensor:
    return tensors((1, 2, length, 8), (1, 2, 1, 8), torch.float32)[0]


def fake(call, q: Tensor) -> None:
    with FakeTensorMode() as mode:
        call(mode.from_tensor(q))


def traced(call, q: Tensor) -> None:
    make_fx(call)(q)


def symbolically_traced(call, q: Tensor) -> None:
    make_fx(call, tracing_mode="symbolic")(q)


def on_meta(call, q: Tensor) -> None:
    with torch.device("meta"):
        call(q)


def by_default_on_meta(call, q: Tensor) -> None:
    torch.set_default_device("meta")
    try:
        call(q)
    finally:
        torch.set_default_device(None)


def differentiated(call, q: Tensor) -> None:
    torch.func.grad(lambda q: call(q).sum())(q)


def compiled(call, q: Tensor) -> None:
    torch.compile(call, backend="eager")(q)


def in_inference_mode(call, q: Tensor) -> None:
    with torch.inference_mode():
        call(q)


def in_a_function_mode(call, q: Tensor) -> None:
    class Wrapped(Tensor):
        pass

    class Wrapping(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out.as_subclass(Wrapped) if func is torch.log else out

    with Wrapping():
        call(q)


MODES = [
    fake,
    traced,
    symbolically_traced,
    on_meta,
    by_default_on_meta,
    differentiated,
    compiled,
    in_inference_mode,
    in_a_function_mode,
]


# Compiling takes long, and statistics have no gradient for torch.func to take.
PLAIN_ONLY = {differentiated: ("causal", "one row"), compiled: ("causal",)}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in KINDS for mode in MODES if kind in PLAIN_ONLY.get(mode, KINDS)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_call_in_a_mode_leaves_the_next_ordinary_call_alone(kind, mode):
    torch.compiler.reset()
    state.SCRATCH.clear()
    q, policy = query(fresh_length()), build_policy("log")
    with torch.no_grad():
        mode(lambda q: KINDS[kind](q, policy), q)
        first = KINDS[kind](q, policy)
    leaf = q.clone().requires_grad_()
    second = KINDS[kind](leaf, policy)
    assert type(first) is Tensor
    assert first.device == q.device
    torch.testing.assert_close(first, second.detach())
    if second.requires_grad:
        second.sum().backward()
        assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [fake, traced, on_meta], ids=lambda mode: mode.__name__)
def test_an_ordinary_call_leaves_the_next_call_in_a_mode_alone(kind, mode):
    q, policy = query(fresh_length()), build_policy("log")
    with torch.no_grad():
        KINDS[kind](q, policy)
        mode(lambda q: KINDS[kind](q, policy), q)


def test_a_policy_that_forgets_the_device_does_not_spoil_later_calls():
    class Forgetful(FormulaPolicy):
        name = "forgetful"

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return torch.full(n.shape, 2.0)

    q, policy = query(fresh_length()), Forgetful()
    with torch.device("meta"), pytest.raises((RuntimeError, ValueError)):
        scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy)
    assert torch.isfinite(scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy)).all()


def test_what_has_a_gradient_is_not_remembered():
    weight = torch.tensor(0.5, requires_grad=True)

    class Learned(FormulaPolicy):
        name = "learned_elsewhere"

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            return weight * n

    q, policy = query(fresh_length()), Learned()
    for _ in range(2):
        scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy).sum().backward()
    assert weight.grad is not None


def test_threads_share_the_memory_without_losing_an_entry():
    policies = [build_policy("log", gamma=1 + i / 100) for i in range(5)]
    queries = [query(1 + length) for length in range(1, 24)]
    expected = {
        (p, q): KINDS["causal"](query, policy) for p, policy in enumerate(policies) for q, query in enumerate(queries)
    }
    failures: list[object] = []

    def work(start: int) -> None:
        with torch.no_grad():
            for turn in range(200):
                p, q = (start + turn) % len(policies), (3 * start + 7 * turn) % len(queries)
                try:
                    if not torch.equal(KINDS["causal"](queries[q], policies[p]), expected[p, q]):
                        failures.append((p, q))
                    KINDS["one row"](queries[q], policies[p])
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet in the middle of a look-up
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


def test_an_n_that_changes_leaves_nothing_behind():
    q = query(12)
    mask = torch.ones(12, 12, dtype=torch.bool)
    visible = torch.full((1, 1, 12), 3)
    before = len(state.BETAS)
    for _ in range(50):
        scaled_dot_product_attention(q, q, q, mask, policy="log", visible=visible)
        visible += 1
    assert len(state.BETAS) == before


def test_a_count_of_our_own_is_asked_for_once_and_dies_with_its_tensor():
    calls: list[int] = []

    class Counting(FormulaPolicy):
        name = "counting"

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            calls.append(n.numel())
            return n.double()

    policy = Counting()
    calls.clear()
    q, mask = query(12), torch.ones(12, 12, dtype=torch.bool)
    visible = mark_counted(torch.full((1, 1, 12), 12))
    for _ in range(3):
        scaled_dot_product_attention(q, q, q, mask, policy=policy, visible=visible)
    assert len(calls) == 1
    alive = weakref.ref(visible)
    del visible
    gc.collect()
    assert alive() is None


def test_the_memory_is_bounded_in_number_and_in_size():
    memory: Memory[Tensor] = Memory(most=4)
    host = torch.device("cpu")
    for key in range(20):
        memory.recall(key, host, lambda: torch.zeros(3))
    assert len(memory) == 4
    memory.recall("long", host, lambda: torch.zeros(MOST_ELEMENTS + 1))
    assert len(memory) == 4
    kept = memory.recall(19, host, lambda: torch.ones(3))
    assert torch.equal(kept, torch.zeros(3))


def test_what_is_made_may_ask_the_memory_itself_and_push_others_out():
    memory: Memory[Tensor] = Memory(most=2)
    host = torch.device("cpu")

    def make() -> Tensor:
        return torch.stack([memory.recall(key, host, lambda: torch.zeros(1)) for key in range(5)])

    assert memory.recall(0, host, make).shape == (5, 1)
    assert len(memory) == 2


def test_a_policy_that_is_no_formula_is_asked_each_time():
    class Annealed(LengthPolicy):
        name = "annealed_by_itself"
        step = 0

        def formula(self, n: Tensor, position: Tensor) -> Tensor:
            self.step += 1
            return torch.full(n.shape, float(self.step))

    q, policy = query(9), Annealed()
    outputs = [scaled_dot_product_attention(q, q, q, is_causal=True, policy=policy) for _ in range(2)]
    assert not torch.equal(*outputs)
