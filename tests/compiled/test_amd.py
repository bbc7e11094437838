"""The gfx942 executor on small programs, whose results are written out here."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled.amd import core
from compiled.amd import execute as execution
from compiled.amd.decode import decode
from compiled.amd.text import ProgramError, read_kernel
from compiled.execution import FINITE, NAN, Settings
from compiled.launching import Argument, Kernel
from compiled.memory import Finding, Findings, GlobalMemory

HEAD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
program:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
.LBB0_0:
	s_load_dwordx2 s[4:5], s[0:1], 0x0
	v_lshlrev_b32_e32 v1, 2, v0
	s_waitcnt lgkmcnt(0)
"""
TAIL = """
	global_store_dword v1, v9, s[4:5]
	s_endpgm
	.section .rodata
	.amdhsa_kernel program
	{declared}
	.amdgpu_metadata
    .args:
{arguments}
    .group_segment_fixed_size: 0
	.end_amdgpu_metadata
"""
DECLARED = {
    "user_sgpr_kernarg_segment_ptr": 1, "user_sgpr_dispatch_ptr": 0, "user_sgpr_queue_ptr": 0,
    "user_sgpr_dispatch_id": 0, "user_sgpr_private_segment_size": 0, "user_sgpr_kernarg_preload_offset": 0,
    "system_sgpr_workgroup_id_x": 1, "system_vgpr_workitem_id": 0, "float_round_mode_32": 0,
    "float_round_mode_16_64": 0, "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3, "dx10_clamp": 1,
    "ieee_mode": 1, "group_segment_fixed_size": 0, "private_segment_fixed_size": 0, "user_sgpr_count": 4,
    "user_sgpr_kernarg_preload_length": 2, "kernarg_size": 24,
}  # fmt: skip


def text_of(body: str) -> str:
    declared = "\n\t".join(f".amdhsa_{name} {value}" for name, value in DECLARED.items())
    arguments = "".join(
        f"      - .offset: {8 * i}\n        .size: 8\n        .value_kind: global_buffer\n" for i in range(3)
    )
    lines = "".join(f"\t{line.strip()}\n" for line in body.strip().splitlines())
    return HEAD.lstrip("\n") + lines + TAIL.lstrip("\n").format(declared=declared, arguments=arguments)


def run(body: str, out: Tensor, warps: int = 1, settings: Settings = NAN, shared: int = 4096) -> list[Finding]:
    """Execute a program that leaves its result in v9; lane l of all waves stores it in element l of `out`."""
    kernel = Kernel("program", "gfx942", text_of(body), shared, warps, ())
    findings = Findings()
    memory = GlobalMemory([out], [out])
    execution.execute(kernel, [Argument("out", "*i32", out.data_ptr())], memory, findings, 1, settings)
    return findings.kept()


def lanes(body: str, warps: int = 1, settings: Settings = NAN) -> np.ndarray:
    """The bits that the lanes leave in v9; nothing is reported."""
    out = torch.zeros(64 * warps, dtype=torch.int32)
    assert run(body, out, warps, settings) == []
    return out.numpy().view(np.uint32)


def kinds(body: str, warps: int = 1, settings: Settings = NAN, shared: int = 4096) -> set[str]:
    """What is reported."""
    found = run(body, torch.zeros(64 * warps, dtype=torch.int32), warps, settings, shared)
    return {finding.kind for finding in found}


@pytest.fixture(params=["C", "numpy"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines; without a C compiler, numpy twice."""
    monkeypatch.setattr(execution, "LIMIT", 10_000)
    if request.param == "numpy":
        monkeypatch.setattr(core, "library", lambda: None)


LANE = np.arange(64)


def test_both_entry_points_find_the_arguments(engine: None) -> None:
    for settings in (NAN, FINITE):
        assert np.array_equal(lanes("v_mov_b32_e32 v9, v0", settings=settings), LANE)
    preloaded = "s_mov_b32 s4, s2\ns_mov_b32 s5, s3\nv_mov_b32_e32 v9, s2"
    assert len(set(lanes(preloaded).tolist())) == 1


def test_registers_start_as_poison(engine: None) -> None:
    for settings in (NAN, FINITE):
        assert (lanes("v_mov_b32_e32 v9, v77", settings=settings) == settings.poison).all()
        assert (lanes("v_accvgpr_read_b32 v9, a3", settings=settings) == settings.poison).all()
        assert (lanes("v_mov_b32_e32 v9, s77", settings=settings) == settings.poison).all()


def bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v_add_u32_e32 v9, -1, v0", LANE - 1),
        ("v_sub_u32_e64 v9, v0, 5 clamp", np.maximum(LANE - 5, 0)),
        ("v_bfe_u32 v9, v0, 1, 3", LANE >> 1 & 7),
        ("v_lshlrev_b32_e32 v8, 29, v0\nv_bfe_i32 v9, v8, 29, 3", (LANE + 4) % 8 - 4),
        ("v_mov_b32_e32 v8, 0x04030201\ns_mov_b32 s8, 0x0c050104\nv_perm_b32 v9, v0, v8, s8", LANE | 0x200),
        ("v_mad_u32_u24 v9, v0, 3, v0", 4 * LANE),
        ("v_mul_hi_u32 v9, v1, -1", np.maximum(4 * LANE - 1, 0)),
        ("v_cmp_gt_u32_e32 vcc, 9, v0\nv_cndmask_b32_e32 v9, 5, v0, vcc", np.where(LANE < 9, LANE, 5)),
        ("v_cvt_f32_u32_e32 v8, v0\nv_fma_f32 v9, v8, 2.0, -v8", [bits(float(x)) for x in LANE]),
        ("v_mov_b32_e32 v8, 1.0\nv_cvt_f32_u32_e32 v7, v0\nv_max_f32_e64 v9, -v7, |v8|", [bits(1.0)] * 64),
        ("v_mov_b32_e32 v8, 0x7fc00000\nv_max_f32_e32 v9, 2.0, v8", [bits(2.0)] * 64),
        ("v_mov_b32_e32 v8, 0xc0000000\nv_exp_f32_e32 v9, v8", [bits(0.25)] * 64),
        ("v_mov_b32_e32 v8, 0xff7f\nv_cvt_f32_f16_sdwa v9, v8 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1",
         [0] * 64),
        ("v_lshlrev_b16_e32 v9, 15, v0", (LANE & 1) << 15),
        ("v_or_b32_sdwa v9, v0, v0 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0", LANE << 16),
        ("v_mov_b32_e32 v9, 8\ns_mov_b64 s[8:9], 6\ns_and_saveexec_b64 s[8:9], s[8:9]\nv_mov_b32_e32 v9, 3\n"
         "s_mov_b64 exec, s[8:9]", [8, 3, 3] + [8] * 61),
    ],
)  # fmt: skip
def test_arithmetic(engine: None, body: str, expected: Sequence[int]) -> None:
    assert np.array_equal(lanes(body), np.asarray(expected).astype(np.uint32))


@pytest.mark.parametrize(
    ("modifiers", "source"),
    [
        ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda n: n ^ 1),
        ("row_shr:4 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda n: n - 4 if n % 16 >= 4 else None),
        ("row_shl:8 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda n: n + 8 if n % 16 < 8 else None),
        ("row_ror:3 row_mask:0xf bank_mask:0xf", lambda n: n // 16 * 16 + (n - 3) % 16),
        ("row_bcast:15 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda n: n // 16 * 16 - 1 if n > 15 else None),
        ("row_bcast:31 row_mask:0xf bank_mask:0xf bound_ctrl:1", lambda n: 31 if n > 31 else None),
        ("row_mirror row_mask:0xf bank_mask:0xf", lambda n: n ^ 15),
        ("row_half_mirror row_mask:0xf bank_mask:0xf", lambda n: n ^ 7),
    ],
)
def test_lanes_are_permuted(engine: None, modifiers: str, source: Callable[[int], int | None]) -> None:
    found = lanes(f"v_add_u32_e32 v8, 100, v0\nv_mov_b32_e32 v9, 7\nv_mov_b32_dpp v9, v8 {modifiers}")
    expected = [0 if source(lane) is None else 100 + source(lane) for lane in range(64)]  # type: ignore[operator]
    assert found.tolist() == expected


def test_rows_and_banks_outside_of_the_masks_keep_their_value(engine: None) -> None:
    found = lanes("v_mov_b32_e32 v9, 7\nv_mov_b32_dpp v9, v0 row_bcast:15 row_mask:0xa bank_mask:0xe")
    kept = (LANE // 16 % 2 == 0) | (LANE % 16 < 4)
    assert np.array_equal(found, np.where(kept, 7, LANE // 16 * 16 - 1))


def test_lanes_swap_through_lds_hardware(engine: None) -> None:
    assert np.array_equal(lanes("ds_swizzle_b32 v9, v0 offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)"), LANE ^ 16)
    permuted = "v_xor_b32_e32 v8, 0xfc, v1\nds_bpermute_b32 v9, v8, v0\ns_waitcnt lgkmcnt(0)"
    assert np.array_equal(lanes(permuted), 63 - LANE)


def _matrix_case(rows: int, depth: int, element: str) -> tuple[str, np.ndarray]:
    """Columns of one-hot and counting factors, so that each element of the product names its row and column."""
    per_lane = depth * rows // 64
    half = element in ("f16", "bf16")
    form = {"f32": "<f", "xf32": "<f", "f16": "<e"}.get(element)

    def word(x: float) -> int:
        if element == "bf16":
            return bits(x) >> 16
        return int.from_bytes(struct.pack(str(form), x), "little")

    body, a, b = [], np.zeros((rows, depth)), np.zeros((depth, rows))
    for register, matrix in ((10, a), (20, b)):
        for j in range(per_lane):
            for lane in range(64):
                row, k = lane % rows, lane // rows * per_lane + j
                value = float((row * 3 + k * 5 + register) % 7 - 3)
                matrix[(row, k) if register == 10 else (k, row)] = value
                place = register + (j // 2 if half else j)
                if not half or j % 2 == 0:
                    body.append(f"s_mov_b32 s8, {word(value):#x}\nv_writelane_b32 v{place}, s8, {lane}")
                else:
                    body.append(
                        f"v_readlane_b32 s9, v{place}, {lane}\ns_or_b32 s8, s9, {word(value) << 16:#x}\n"
                        f"v_writelane_b32 v{place}, s8, {lane}"
                    )
    return "\n".join(body), a @ b


@pytest.mark.parametrize(
    ("rows", "depth", "element"),
    [
        (32, 8, "f16"), (32, 8, "bf16"), (16, 16, "f16"), (16, 16, "bf16"), (32, 2, "f32"), (16, 4, "f32"),
        (32, 4, "xf32"), (16, 8, "xf32"),
    ],
)  # fmt: skip
def test_matrix_products_have_the_layout_of_the_manual(engine: None, rows: int, depth: int, element: str) -> None:
    body, product = _matrix_case(rows, depth, element)
    per_lane = depth * rows // 64
    words = per_lane // 2 if element in ("f16", "bf16") else per_lane
    results = rows * rows // 64
    factor = (lambda first: f"v[{first}:{first + words - 1}]") if words > 1 else (lambda first: f"v{first}")
    shape = f"{rows}x{rows}x{depth}_{element}"
    for register in (0, results - 1, results // 2):
        instruction = f"v_mfma_f32_{shape} v[40:{39 + results}], {factor(10)}, {factor(20)}, 1.0"
        found = lanes(f"{body}\n{instruction}\nv_mov_b32_e32 v9, v{40 + register}").view(np.float32)
        group = LANE // rows
        row = 8 * (register // 4) + 4 * group + register % 4 if rows == 32 else 4 * group + register
        assert np.array_equal(found, product[row, LANE % rows] + 1)


def test_shared_memory_holds_bytes_words_and_strided_pairs(engine: None) -> None:
    strided = """
        v_mov_b32_e32 v7, 9
        ds_write2st64_b32 v1, v0, v7 offset1:1
        s_waitcnt lgkmcnt(0)
        ds_read2st64_b32 v[8:9], v1 offset0:1 offset1:0
        s_waitcnt lgkmcnt(0)"""
    assert np.array_equal(lanes(strided), LANE)
    small = """
        v_lshlrev_b32_e32 v7, 1, v0
        v_lshlrev_b32_e32 v8, 16, v0
        ds_write_b8_d16_hi v0, v8 offset:256
        ds_write_b16 v7, v0
        s_waitcnt lgkmcnt(0)
        ds_read_u16 v6, v7
        ds_read_u8 v9, v0 offset:256
        s_waitcnt lgkmcnt(0)
        v_lshl_or_b32 v9, v6, 8, v9"""
    assert np.array_equal(lanes(small), LANE << 8 | LANE)


def test_a_buffer_refuses_offsets_beyond_its_size(engine: None) -> None:
    body = """
        s_mov_b32 s8, s4
        s_and_b32 s9, s5, 0xffff
        s_mov_b32 s10, 0x7ffffffe
        s_mov_b32 s11, 0x27000
        v_mov_b32_e32 v9, 5
        v_bfrev_b32_e32 v7, 1
        v_cmp_gt_u32_e32 vcc, 32, v0
        v_cndmask_b32_e32 v7, v7, v1, vcc
        buffer_store_dword v0, v7, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        buffer_load_dword v9, v7, s[8:11], 0 offen
        s_waitcnt vmcnt(0)"""
    # Lanes beyond 32 neither write nor read; the last store of the program then writes what was loaded.
    assert np.array_equal(lanes(body), np.where(LANE < 32, LANE, 0))


UNEQUAL = "UNEQUAL_BITS"
SHARED = "ds_write_b32 v1, v0\n{}ds_read_b32 v9, v8\ns_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize(
    ("body", "kind", "warps"),
    [
        ("s_load_dword s8, s[4:5], 0x0\nv_mov_b32_e32 v9, s8", "HAZARD", 1),
        ("ds_read_b32 v9, v1\nv_add_u32_e32 v9, 1, v9", "HAZARD", 1),
        ("ds_read_b32 v9, v1\nv_mov_b32_e32 v9, 1", "HAZARD", 1),
        ("global_load_dword v8, v1, s[4:5]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v9, v8", "HAZARD", 1),
        ("ds_read_b32 v8, v1\nds_read_b32 v9, v1\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v9, v9", "HAZARD", 1),
        ("global_load_dword v9, v1, s[4:5] offset:4", "OUTSIDE", 1),
        ("ds_write_b32 v1, v0 offset:4092\nv_mov_b32_e32 v9, 1", "SHARED_OUTSIDE", 1),
        ("v_mov_b32_e32 v8, 0\nds_write_b32 v8, v0\nv_mov_b32_e32 v9, 1", UNEQUAL, 1),
        ("v_and_b32_e32 v1, 0x7c, v1\nv_mov_b32_e32 v9, v0", UNEQUAL, 1),
        ("v_xor_b32_e32 v8, 0x100, v1\n" + SHARED.format("s_waitcnt lgkmcnt(0)\n"), "RACE", 2),
        ("v_xor_b32_e32 v8, 0x100, v1\n" + SHARED.format("s_barrier\n"), "RACE", 2),
        ("v_mov_b32_e32 v9, 1\ns_branch .LBB0_0", "UNFINISHED", 1),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported(engine: None, body: str, kind: str, warps: int) -> None:
    assert kind in kinds(body, warps)


def test_waits_and_a_barrier_make_it_right(engine: None) -> None:
    body = "v_xor_b32_e32 v8, 0x100, v1\n" + SHARED.format("s_waitcnt lgkmcnt(0)\ns_barrier\n")
    for settings in (NAN, FINITE):
        found = lanes(body, warps=2, settings=settings)
        assert np.array_equal(found, np.arange(128) ^ 64)
    older = "ds_read_b32 v9, v1\nds_read_b32 v8, v1\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v9, v9\ns_waitcnt lgkmcnt(0)"
    assert kinds(f"ds_write_b32 v1, v0\n{older}") == set()


def test_warps_that_meet_at_different_barriers_are_reported(engine: None) -> None:
    body = """
        v_readfirstlane_b32 s8, v0
        s_cmp_eq_u32 s8, 0
        s_cbranch_scc1 .LBB0_0x
        s_barrier
        .LBB0_0x:
        v_mov_b32_e32 v9, v0"""
    body = body.replace(".LBB0_0x:", "\n.LBB0_1:").replace(".LBB0_0x", ".LBB0_1")
    assert "BARRIER" in kinds(body, warps=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("v_frobnicate_b32 v9, v0", "unknown instruction"),
        ("v_add_u32_e32 v9, v0", "2 sources expected"),
        ("v_add_u32_e32 v9, v0, v1, v2", "2 sources expected"),
        ("v_add_f32_e64 v9, v0, v1 mul:2", "not known"),
        ("v_add_u32_e32 v9, v0, v[2:3]", "is not 1 registers"),
        ("v_add_u32_e32 v9, v0, w1", "unknown operand 'w1'"),
        ("v_mov_b32_dpp v9, v0 row_newbcast:3 row_mask:0xf bank_mask:0xf", "lane permutation"),
        ("v_or_b32_sdwa v9, v0, v0 dst_sel:NIBBLE dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD", "dst_sel"),
        ("global_load_dword v9, v1, s[4:5] lds", "unknown modifiers"),
        ("buffer_load_dword v9, v1, s[8:11], 0 idxen", "unknown modifiers"),
        ("buffer_atomic_add v9, v1, s[8:11], 0 offen", "unknown instruction"),
        ("v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[2:3], v[4:5], 0", "unknown instruction"),
        ("v_mfma_f32_16x16x4_f32 v[16:31], v2, v4, 0", "is not 4 registers"),
        ("ds_swizzle_b32 v9, v0 offset:swizzle(REVERSE,8)", "unknown swizzle"),
        ("s_waitcnt expcnt(0)", "unknown counter"),
        ("s_branch .LBB0_9", "unknown label"),
        ("v_pk_add_f32 v[8:9], v[2:3], 1.0", "halves of a constant"),
        (".amdhsa_surprise 1", "unknown directive"),
    ],
)
def test_the_unknown_is_refused_with_its_line(body: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        decode(read_kernel(text_of(body)))
    assert "line 10: " in str(caught.value)


def test_another_target_is_refused() -> None:
    with pytest.raises(ProgramError, match="not gfx942"):
        read_kernel(text_of("v_mov_b32_e32 v9, 1").replace("hsa--gfx942", "hsa--gfx90a"))


def test_both_engines_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every float rule on operands that a wave mixes from its lane number, special values included.
    special = [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x1, 0x807FFFFF, 0x3F800000, 0x7F7FFFFF, 0xC7800000]
    body = ["v_mul_lo_u32 v2, v0, 0x9e3779b1", "v_mul_lo_u32 v3, v0, 0x85ebca77", "v_mul_lo_u32 v4, v0, 0xc2b2ae3d"]
    for i, value in enumerate(special):
        for register, step in ((2, 1), (3, 10), (4, 3)):
            lane = (i * step + register) % 64
            body += [f"s_mov_b32 s8, {value:#x}", f"v_writelane_b32 v{register}, s8, {lane}"]
    body.append("v_mov_b32_e32 v9, 0")
    for opcode in (
        "v_add_f32_e32 v8, v2, v3", "v_mul_f32_e32 v8, v2, v3", "v_fma_f32 v8, v2, v3, v4", "v_max3_f32 v8, v2, v3, v4",
        "v_med3_f32 v8, v2, v3, v4", "v_rcp_f32_e32 v8, v2", "v_rsq_f32_e32 v8, v3", "v_ldexp_f32 v8, v2, v0",
        "v_cvt_f16_f32_e32 v8, v2", "v_cvt_f32_f16_e32 v8, v3", "v_cvt_pkrtz_f16_f32 v8, v2, v3",
        "v_div_scale_f32 v8, vcc, v2, v2, v3", "v_div_scale_f32 v8, vcc, v3, v2, v3", "v_div_fmas_f32 v8, v2, v3, v4",
        "v_div_fixup_f32 v8, v2, v3, v4", "v_cvt_u32_f32_e32 v8, v2", "v_cvt_i32_f32_e32 v8, v2",
        "v_perm_b32 v8, v2, v3, v4", "v_bfrev_b32_e32 v8, v2", "v_min_f32_e32 v8, v2, v3",
    ):  # fmt: skip
        body += [opcode, "v_mul_lo_u32 v9, v9, 31", "v_xor_b32_e32 v9, v9, v8"]
    first = lanes("\n".join(body))
    monkeypatch.setattr(core, "library", lambda: None)
    assert np.array_equal(first, lanes("\n".join(body)))
