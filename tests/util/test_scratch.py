"""The buffer that inference on the CPU multiplies into is never seen from outside."""

import threading

import pytest
import torch
from oracle import tensors
from torch.utils._python_dispatch import TorchDispatchMode

from attnscale import scaled_dot_product_attention
from attnscale._util import memory, state


def attend(seed: int = 0, dtype: torch.dtype = torch.float32, tokens: int = 9):
    q, k, v = tensors((1, 2, tokens, 8), (1, 2, tokens, 8), dtype, seed)
    return scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_gives_the_bits_of_training(dtype, mode):
    expected = attend(dtype=dtype)
    with mode():
        assert torch.equal(attend(dtype=dtype), expected)


@torch.no_grad()
def test_a_later_call_does_not_change_an_earlier_result():
    first = attend(seed=1)
    kept = first.clone()
    attend(seed=2)
    attend(seed=3, tokens=5)
    assert torch.equal(first, kept)


def test_modes_may_alternate():
    expected = attend()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad):
        with mode():
            assert torch.equal(attend(), expected)


def test_gradients_do_not_pass_through_the_buffer():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 8), (1, 2, 9, 8)))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")
    with torch.no_grad():
        attend(dtype=torch.float64)
    (expected,) = torch.autograd.grad(
        scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend="reference").sum(), k
    )
    (got,) = torch.autograd.grad(out.sum(), k)
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_each_thread_has_its_own():
    seeds = range(4)
    expected = {seed: attend(seed) for seed in seeds}
    wrong = []

    def work(seed: int) -> None:
        with torch.no_grad():
            wrong.extend(seed for _ in range(50) if not torch.equal(attend(seed), expected[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own: SDPA has no batching rule on the CPU
@torch.no_grad()
def test_functional_transforms_and_dispatch_modes_are_left_alone():
    q, k, v = tensors((3, 1, 2, 9, 8), (3, 1, 2, 9, 8), torch.float32)

    def one(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, policy="log")

    torch.testing.assert_close(torch.vmap(one)(q, k, v), torch.stack([one(*x) for x in zip(q, k, v, strict=True)]))

    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "out" not in (kwargs or {})
            return func(*args, **(kwargs or {}))

    with Pass():
        one(q[0], k[0], v[0])


@torch.no_grad()
def test_a_long_query_is_not_kept(monkeypatch):
    monkeypatch.setattr(memory, "MOST_BYTES", 64)
    x = torch.ones(100)
    a, b = (state.SCRATCH.room("product", x.shape, x) for _ in range(2))
    assert a.data_ptr() != b.data_ptr()
