"""No races between the programs of a launch: every kernel, on ragged shapes, in Triton's interpreter.

Each output element is written once, by one program, and nothing else is written. No program reads an element that
another writes in the same launch, or out of bounds. Any program order gives the same bits. Races inside a program are
not covered.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected
from flash_cases import DTYPES, Case, Inputs, inputs_of
from launch_tensors import OUTPUTS, name_of, outputs_of, tensors_of
from recorded_memory import assert_no_race, assert_reads_inside, recording
from torch import Tensor

from attnscale_kernels.decode.launch import decode, decode_launches
from attnscale_kernels.flash import mask as masks
from attnscale_kernels.flash.launch import backward_launches, flash_backward, flash_forward, forward_launches
from attnscale_kernels.gaps.launch import bracket_launches, count_launches, gap_count
from attnscale_kernels.launch import Launch, Tile
from attnscale_kernels.softmax.launch import backward_launches as softmax_backward_launches
from attnscale_kernels.softmax.launch import forward_launches as softmax_launches
from attnscale_kernels.visibility import Visibility

FP32, FP16, BF16 = DTYPES
TILE, WIDE = Tile(16, 16, 4, 1), Tile(16, 32, 4, 1)


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).clone()


def check(launches: tuple[Launch, ...], like: Tensor) -> set[str]:
    """Run launches in order, each also in random program order; return the names of their kernels."""
    for launch in launches:
        outputs = outputs_of(launch)
        with recording() as recorded:
            launch.run(like)
        (accesses,) = recorded
        assert launch.grid > 1
        assert_no_race(accesses, outputs)
        assert_reads_inside(accesses, list(tensors_of(launch.arguments.values())))
        expected = [bits(x) for x in outputs]
        for x in outputs:
            x.fill_(7)
        with recording(np.random.default_rng(0)):
            launch.run(like)
        for x, before in zip(outputs, expected, strict=True):
            assert torch.equal(bits(x), before), "the order of programs matters"
    return {name_of(launch) for launch in launches}


SHAPE = {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 21, "keys": 29, "dim": 24}
FLASH = (
    Case(sees="causal", beta="each", sinks=True, **SHAPE),
    Case(sees="window_5_and_9", dtype=FP16, value_dim=40, **SHAPE),
    Case(sees="any_intervals", dropout_p=0.3, dtype=BF16, **SHAPE),
    Case(sees="documents_with_padding", softcap=3.0, **SHAPE),
    Case(sees="bias_that_hides", beta="any_sign", **SHAPE | {"batch": 1}),
)


def flash(x: Inputs) -> set[str]:
    options = {"scale": x.scale, "softcap": x.softcap, "dropout_p": x.dropout_p, "seed": x.seed}
    given = (x.q, x.k, x.v, x.beta, x.seen.visibility)
    found = check(forward_launches(*given, sinks=x.sinks, entropy=True, winner=True, tile=TILE, **options)[0], x.q)
    forward = flash_forward(*given, sinks=x.sinks, tile=TILE, **options)
    launches, _ = backward_launches(
        x.gradient, *given, forward.out, forward.lse, dbeta=True, query_tile=TILE, key_tile=TILE, **options
    )
    return found | check(launches, x.q)


def decoding(x: Inputs) -> set[str]:
    given = (x.q, x.k, x.v, x.beta, x.seen.visibility)
    options = {"scale": x.scale, "softcap": x.softcap, "sinks": x.sinks, "entropy": True, "winner": True, "tile": TILE}
    found = set()
    for splits in (1, 3):
        found |= check(decode_launches(*given, splits=splits, **options)[0], x.q)
    return found


def gaps(x: Inputs) -> set[str]:
    given = (x.q, x.k, x.seen.visibility)
    options = {"scale": x.scale, "softcap": x.softcap, "tile": WIDE}
    found = check(bracket_launches(*given, **options)[0], x.q)
    return found | check(count_launches(*given, [0.1, 1.0, 3.0], **options)[0], x.q)


@pytest.mark.parametrize("case", FLASH, ids=str)
def test_programs_of_flash_attention_do_not_race(case: Case) -> None:
    assert len(flash(inputs_of(case))) == 4


def test_nor_do_those_that_find_the_tiles_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "LEAST_SCORES", 0)  # otherwise a call this small skips the classification
    case = Case(sees="mask_per_batch_and_head", **SHAPE | {"heads": 4, "kv_heads": 2, "batch": 1})
    assert len(flash(inputs_of(case))) == 6


def inside_rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_nor_where_heads_lie_inside_of_rows() -> None:
    x = inputs_of(FLASH[0])
    x.q, x.k, x.v, x.gradient = (inside_rows(t) for t in (x.q, x.k, x.v, x.gradient))
    flash(x)


@pytest.mark.parametrize("sees", ["causal", "any_intervals", "left_padding"])
def test_programs_of_decoding_do_not_race(sees: str) -> None:
    x = inputs_of(Case(**SHAPE | {"sees": sees, "queries": 5, "keys": 61, "sinks": True, "beta": "each"}))
    assert decoding(x) == {"decode_split_kernel", "decode_merge_kernel"}


@pytest.mark.parametrize("sees", ["window_5_and_9", "documents", "bias_that_hides"])
def test_programs_of_gap_counting_do_not_race(sees: str) -> None:
    assert gaps(inputs_of(Case(sees=sees, **SHAPE))) == {"gap_bracket_kernel", "gap_count_kernel"}


@pytest.mark.parametrize(("low", "high"), [(-50, 150), (-(2**31), 2**31 - 1)])
def test_bounds_that_lie_beyond_the_keys_end_with_them(low: int, high: int) -> None:
    # Bounds are data and are not checked before a launch.
    x = inputs_of(Case(**SHAPE | {"sees": "any_intervals", "keys": 61, "beta": "each"}))
    some = torch.arange(21) % 5 == 0
    start = torch.stack([torch.full((21,), low), torch.where(some, -1, 20)]).int()
    stop = torch.stack([torch.full((21,), high), torch.where(some, 62, 40)]).int()
    beyond = Visibility(start=start, stop=stop)
    within = Visibility(start=start.clamp(0, 61), stop=stop.clamp(0, 61))
    results = []
    for visibility in (beyond, within):
        x.seen = x.seen._replace(visibility=visibility)
        given, options = (x.q, x.k, x.v, x.beta, visibility), {"scale": x.scale}
        forward = flash_forward(*given, entropy=True, winner=True, tile=TILE, **options)
        gradients = flash_backward(
            x.gradient, *given, forward.out, forward.lse, query_tile=TILE, key_tile=TILE, **options
        )
        decoded = decode(*given, splits=3, tile=TILE, **options)
        counted = gap_count(x.q, x.k, visibility, [0.5, 2.0], tile=WIDE, **options)
        results.append((*forward, *gradients[:3], *decoded[:3], counted))
        for run in (flash, decoding, gaps):
            run(x)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("keys", [37, 100])
def test_programs_of_the_softmax_do_not_race(keys: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, keys, generator=generator)
    beta, mask = torch.ones(2, 1, 5), torch.rand(2, 1, 5, keys, generator=generator) < 0.7
    bias = torch.randn(1, 3, 5, keys, generator=generator)
    tile = Tile(4, 32, 1, 1) if keys == 100 else None  # rows in several steps, and several rows per program
    launches, found = softmax_launches(
        scores, beta, mask=mask, bias=bias, thresholds=torch.tensor([0.5, 2.0]), tile=tile
    )
    names = check(launches, scores)
    backward = softmax_backward_launches(scores, found.weights, beta, scores=scores, bias=bias, tile=tile)
    assert names | check(backward[0], scores) == {"softmax_forward_kernel", "softmax_backward_kernel"}


def test_every_kernel_is_among_them() -> None:
    # A new kernel must be added above with its outputs, and be run by one of these tests.
    modules = (
        "flash.forward_kernel", "flash.backward_kernel", "flash.mask_kernel", "decode.kernel", "gaps.kernel",
        "softmax.kernel",
    )  # fmt: skip
    found = set()
    for name in modules:
        module = __import__(f"attnscale_kernels.{name}", fromlist=["*"])
        found |= {key for key, value in vars(module).items() if key.endswith("_kernel") and hasattr(value, "fn")}
    assert found == set(OUTPUTS)


# The recorder detects violations.


@triton.jit
def _shared_kernel(out_ptr):
    tl.store(out_ptr + tl.program_id(0) // 2, 1.0)


@triton.jit
def _reading_kernel(out_ptr):
    before = tl.load(out_ptr + tl.program_id(0) - 1, mask=tl.program_id(0) > 0, other=0.0)
    tl.store(out_ptr + tl.program_id(0), before + 1.0)


@triton.jit
def _leaving_kernel(out_ptr):
    tl.store(out_ptr + tl.program_id(0), 1.0, mask=tl.program_id(0) != 2)


@triton.jit
def _beyond_kernel(out_ptr):
    tl.store(out_ptr + tl.program_id(0), 1.0)
    tl.store(out_ptr + 4, 1.0, mask=tl.program_id(0) == 0)


@triton.jit
def _atomic_kernel(out_ptr):
    tl.atomic_add(out_ptr + tl.program_id(0), 1.0)


@triton.jit
def _right_kernel(out_ptr):
    own = tl.load(out_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0), own + 1.0)


def run_alone(kernel: Callable, outputs: int) -> Tensor:
    memory = torch.zeros(8)
    with recording(np.random.default_rng(0)) as recorded:
        kernel[(4,)](memory)
    assert_no_race(recorded[0], [memory[:outputs]])
    return memory


@pytest.mark.parametrize(
    ("kernel", "outputs", "message"),
    [
        (_shared_kernel, 2, "2 elements are written more than once"),
        (_reading_kernel, 4, "3 reads of what another program writes"),
        (_leaving_kernel, 4, "1 elements are not written"),
        (_beyond_kernel, 4, "1 other elements are written"),
        (_atomic_kernel, 4, "an atomic operation"),
    ],
    ids=["shared", "read", "left_out", "beyond", "atomic"],
)
def test_a_kernel_that_races_is_found(kernel: Callable, outputs: int, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_alone(kernel, outputs)


def test_a_program_may_read_what_it_writes_itself() -> None:
    assert run_alone(_right_kernel, 4).tolist() == [1.0] * 4 + [0.0] * 4


def test_a_read_beyond_an_argument_is_found() -> None:
    memory = torch.zeros(8)
    with recording() as recorded:
        _right_kernel[(4,)](memory)
    assert_reads_inside(recorded[0], [memory[:4]])
    with pytest.raises(AssertionError, match="1 elements outside of the arguments are read"):
        assert_reads_inside(recorded[0], [memory[:3]])


def test_the_order_of_programs_is_random() -> None:
    memory = torch.zeros(16)
    with recording(np.random.default_rng(0)):
        _reading_kernel[(16,)](memory)
    assert memory.tolist() != [1.0 + place for place in range(16)]
