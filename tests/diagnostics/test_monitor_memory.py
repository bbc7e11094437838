"""What a monitor adds to the memory of a call, at lengths where a matrix of rows and keys would not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnscale import MultiheadAttention, ScaledDotProductAttention
from attnscale.attention import bind
from attnscale.backends.dispatch import prepare
from attnscale.call.tap import Attended, CallEvent
from attnscale.diagnostics import Monitor
from attnscale.diagnostics.delivery import Notices
from attnscale.diagnostics.listener import LayerListener
from scripts.cost.measuring import peak_bytes
from scripts.cost.monitor import MonitorMemory, build_gpt, training

MOST = 32 * 2**20


def listening_peak(
    length: int,
    heads: int,
    dtype: torch.dtype = torch.float32,
    group: int = 1,
    rows: int = 64,
    pass_over_scores: bool = False,
) -> int:
    """The peak of a listener that hears one causal call, forward and backward; what it is told of is not counted."""
    generator = torch.Generator().manual_seed(0)
    q, out, gradient = (torch.randn(1, heads, length, 16, generator=generator).to(dtype) for _ in range(3))
    k, v = (torch.randn(1, heads // group, length, 16, generator=generator).to(dtype) for _ in range(2))
    _, call, backend, policy = bind(q, k, v, is_causal=True, policy="log", enable_gqa=group > 1)
    call = prepare(call, policy, backend).call
    listener = LayerListener("layer", rows, False, torch.nn.Module(), Notices())
    listener.listening = True
    largest = None if pass_over_scores else torch.zeros(1, heads, length)
    heard = CallEvent(call, Attended(out, largest, exact=not pass_over_scores))

    def step() -> None:
        listener.reset()
        number = listener.begin(graph=True)
        listener.forward(heard, number)
        listener.backward(call, gradient, number)
        listener.gradients(q, k, v)

    return peak_bytes(step)


@pytest.mark.parametrize(("length", "heads"), [(8192, 4), (65536, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_rows_times_the_keys(length, heads, dtype):
    scores = 4 * 64 * heads * length
    assert scores >= 8 * 2**20  # of which a softmax and its gradient need several
    assert listening_peak(length, heads, dtype) < 16 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_million_keys_take_no_more(dtype):
    """A row of them, in a few copies, would: no need to listen to many."""
    assert listening_peak(2**20, 1, dtype, rows=8) < 16 * 2**20


def test_heads_that_share_a_key_head_take_no_more():
    assert listening_peak(2**17, 8, group=8) < 16 * 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_maximum_takes_a_tile(dtype):
    assert listening_peak(4096, 4, dtype, pass_over_scores=True) < 20 * 2**20  # all scores have 256 MB


def test_the_benchmark_reports_what_a_step_takes_more():
    (row,) = MonitorMemory(512).measure()
    assert (row.kernel, row.metric, row.x) == ("monitor", "extra_mb", 512)
    assert 1 < row.y < 32  # the room for a block is a few MB at any length


def test_a_model_of_several_layers_stays_within_the_promise():
    """Six layers of 3 MB: no keys or values of one are held for another."""
    watched, plain = build_gpt(), build_gpt()
    with Monitor(watched, every=1, rows=64, alerts=None) as monitor:
        peaks = [peak_bytes(training(watched, 1024, monitor.step)), peak_bytes(training(plain, 1024))]
    assert peaks[0] - peaks[1] < MOST


@pytest.mark.parametrize("attention", [ScaledDotProductAttention("log"), MultiheadAttention(16, 2, policy="log")])
def test_nothing_is_held_from_step_to_step_but_the_room_for_a_block(attention):
    size = (1, 2, 64, 8) if isinstance(attention, ScaledDotProductAttention) else (64, 1, 16)
    x = torch.randn(size, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Monitor(attention, every=1, alerts=None) as monitor:
        out = attention(x, x, x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        monitor.step(0)
        (layer,) = monitor.layers.values()
        assert not layer._unanswered
        assert layer.captured == {}


def kept_by_autograd(run: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> int:
    """Bytes of all memory that is saved for backward."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, or its place could be another's
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run(tokens)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("compiled", [False, True])
def test_no_layer_keeps_another_activation(compiled):
    model, tokens = build_gpt(layers=2), torch.zeros(1, 256, dtype=torch.int64)
    torch.compiler.reset()
    plain = kept_by_autograd(torch.compile(model) if compiled else model, tokens)
    with Monitor(model, every=1, alerts=None):
        torch.compiler.reset()
        watched = kept_by_autograd(torch.compile(model) if compiled else model, tokens)
    assert plain > 2**20
    assert watched - plain < 4 * 256 * 4  # less than β of every row and head
