"""Rounding of factors to bf16 by integer arithmetic, as on gfx942, in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from corrected_interpreter import corrected

from attnscale_kernels.device import as_factor, plain_nan
from attnscale_kernels.launch import GFX_942, SM_80
from attnscale_kernels.tile_rules import rounds_bits


@pytest.fixture(autouse=True, scope="module")
def _interpreter():
    with corrected():
        yield


@triton.jit
def _rounding_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if PLAIN:
        x = plain_nan(x)
    tl.store(out_ptr + at, as_factor(x, tl.bfloat16, True).to(tl.int16, bitcast=True))


def rounded(bits: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
    out = torch.empty(bits.numel(), dtype=torch.int16)
    _rounding_kernel[(1,)](bits.view(torch.float32), out, bits.numel(), plain)
    return out.view(torch.bfloat16)


def test_the_nearest_number_is_found_and_ties_round_away_from_zero() -> None:
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)).int()
    bits[:64] = bits[:64] & ~0xFFFF | 0x8000
    x = bits.view(torch.float32)
    bits, x = bits[~x.isnan()], x[~x.isnan()]
    bits, x = bits[:2048], x[:2048]
    ties = (bits & 0xFFFF) == 0x8000
    found = rounded(bits)
    assert torch.equal(found[~ties], x.bfloat16()[~ties])
    away = ((bits.long() & 0xFFFF_FFFF) + 0x8000) >> 16
    assert torch.equal(found.view(torch.int16).long() & 0xFFFF, away)
    assert 30 < ties.sum() < 70


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7F810000, 0x7FFF0000, 0x7FFF8000 - 1])
def test_nan_of_bf16_and_of_arithmetic_stay_nan(bits: int) -> None:
    assert rounded(torch.full((16,), bits, dtype=torch.int32)).isnan().all()


def test_any_nan_stays_nan_behind_plain_nan() -> None:
    bits = torch.full((16,), 0x7FFFFFFF, dtype=torch.int32)
    assert not rounded(bits).isnan().any()
    assert rounded(bits, plain=True).isnan().all()
    kept = torch.tensor([0x7F800000, 0x3F800000] * 8, dtype=torch.int32)
    assert torch.equal(rounded(kept, plain=True), kept.view(torch.float32).bfloat16())


def test_only_gfx942_rounds_this_way_and_only_what_holds_no_other_nan() -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    assert rounds_bits(bf16, None, GFX_942)
    assert rounds_bits(bf16, bf16, GFX_942)
    assert not rounds_bits(bf16, fp16, GFX_942)
    assert not rounds_bits(bf16, torch.float32, GFX_942)
    assert not rounds_bits(fp16, None, GFX_942)
    assert not rounds_bits(bf16, None, SM_80)
    assert not rounds_bits(bf16, None, GFX_942._replace(shared_memory=163_840))
