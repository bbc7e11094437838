"""Loops and kinds of instructions, on listings short enough to count by hand."""

from __future__ import annotations

import pytest

from attnscale.bench.static.compiling import cubin_usage, gcn_usage
from attnscale.bench.static.counts import classify, count, hot_loop
from attnscale.bench.static.listing import innermost, loops, parse_gcn, parse_sass


def sass(*lines: str) -> str:
    """A listing as nvdisasm prints it; what begins with a dot is a label."""
    return "\n".join(
        line if line.startswith(".") else f"        /*{16 * number:04x}*/                   {line} ;"
        for number, line in enumerate(lines)
    )


BODY = ["FADD R1, R2, R3"] * 16
EDGE_AND_CLEAR = sass(
    "S2R R0, SR_CTAID.X",
    ".L_x_0:",
    *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 2,
    "MUFU.EX2 R1, R1",
    *BODY,
    "@!P0 BRA `(.L_x_0)",
    ".L_x_1:",
    *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 2,
    "MUFU.EX2 R1, R1",
    *BODY,
    *["FSEL R1, R2, R3, P0"] * 5,
    "@!P0 BRA `(.L_x_1)",
    ".L_x_2:",
    *["ISETP.GE.AND P0, PT, R1, R2, PT"] * 20,
    "@!P0 BRA `(.L_x_2)",
    "EXIT",
    ".L_x_3:",
    "BRA `(.L_x_3)",
)


def test_the_hot_loop_is_the_shortest_of_those_with_most_matrix_products() -> None:
    loop = hot_loop(parse_sass(EDGE_AND_CLEAR))

    assert loop is not None
    counts = count(loop.instructions)
    assert (counts.mma, counts.ex2, counts.fp32, counts.alu, counts.other) == (2, 1, 16, 0, 1)
    assert counts.total == 20
    assert counts.mma_flops == 2 * 2 * 16 * 8 * 16


def test_without_matrix_products_it_is_the_shortest_of_those_with_most_fp32() -> None:
    text = EDGE_AND_CLEAR.replace("HMMA.16816.F32.BF16", "FFMA")

    loop = hot_loop(parse_sass(text))

    assert loop is not None
    assert count(loop.instructions).total == 20
    assert count(loop.instructions).fp32 == 18


def test_of_nested_loops_the_inner_one_counts() -> None:
    text = sass(
        ".L_x_0:", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 4, *BODY,
        ".L_x_1:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", *BODY, "@P1 BRA `(.L_x_1)",
        "@P0 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip

    assert len(loops(parse_sass(text))) == 2
    assert len(innermost(loops(parse_sass(text)))) == 1
    loop = hot_loop(parse_sass(text))
    assert loop is not None
    assert count(loop.instructions).mma == 1


def test_a_wait_behind_the_end_that_jumps_back_is_no_loop_of_its_own() -> None:
    text = sass(
        ".L_x_0:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R1], R2", "@!P1 BRA `(.L_x_8)",
        ".L_x_1:", "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", *BODY, "@P0 BRA `(.L_x_0)",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "EXIT",
        ".L_x_8:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R1], R2", "@P1 BRA `(.L_x_1)", "BRA `(.L_x_8)",
    )  # fmt: skip

    found = {len(loop.instructions) for loop in loops(parse_sass(text))}

    # The wait (with the branch that stays in it) and the loop around it, in which the wait takes part.
    assert found == {3, 20 + 3}
    loop = hot_loop(parse_sass(text))
    assert loop is not None
    assert count(loop.instructions).mma == 1, "the product behind the loop is not in it"


def test_a_jump_that_ptxas_writes_as_a_call_leaves_the_loop() -> None:
    text = sass(
        ".L_x_0:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", *BODY, "@P0 CALL.REL.NOINC `(.L_x_1)", "BRA `(.L_x_0)",
        ".L_x_1:", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 3, "EXIT",
    )  # fmt: skip

    (loop,) = loops(parse_sass(text))

    assert count(loop.instructions).mma == 1


def test_straight_code_has_no_loop() -> None:
    assert hot_loop(parse_sass(sass("FADD R1, R2, R3", "EXIT"))) is None


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HGMMA.64x64x16.F32.BF16", "mma"),
        ("UTCHMMA", "mma"),
        ("MUFU.EX2", "ex2"),
        ("MUFU.RCP", "special"),
        ("FFMA.FTZ", "fp32"),
        ("FFMA2", "fp32_pairs"),
        ("FMNMX3", "alu"),
        ("F2FP.BF16.F32.PACK_AB", "alu"),
        ("LDSM.16.M88.4", "shared"),
        ("LDGSTS.E.BYPASS.128", "memory"),
        ("LDL.LU", "local"),
        ("SHFL.BFLY", "shuffle"),
        ("UIADD3", "other"),
        ("BAR.SYNC.DEFER_BLOCKING", "other"),
        ("v_mfma_f32_32x32x8_bf16_1k", "mma"),
        ("v_exp_f32_e32", "ex2"),
        ("v_rcp_f32_e32", "special"),
        ("v_fmac_f32_e32", "fp32"),
        ("v_pk_fma_f32", "fp32_pairs"),
        ("v_max3_f32", "alu"),
        ("ds_read_b128", "shared"),
        ("ds_bpermute_b32", "shuffle"),
        ("v_mov_b32_dpp", "shuffle"),
        ("buffer_load_dwordx4", "memory"),
        ("scratch_load_dword", "local"),
        ("s_waitcnt", "other"),
    ],
)
def test_every_instruction_has_its_kind(opcode: str, kind: str) -> None:
    assert classify(opcode) == kind


def test_bytes_through_shared_memory() -> None:
    listing = sass("LDSM.16.MT88.4 R4, [R1]", "LDS R1, [R2]", "STS.128 [R1], R4", "LDGSTS.E.BYPASS.128 [R1], [R2.64]")

    assert count(parse_sass(listing)[0].instructions).shared_bytes == 16 + 4 + 16 + 16


GCN = """
.LBB0_0:
\ts_cbranch_scc1 .LBB0_2
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t1 166 31                        ; flash_forward.py:166:31
\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
\tv_exp_f32_e32 v1, v1
\tds_read2st64_b64 v[0:3], v4
\tds_read_u16 v5, v6
\ts_nop 1
""" + "\tv_add_f32_e32 v1, v2, v3\n" * 12 + """\ts_cbranch_scc0 .LBB0_1
.LBB0_2:
\ts_endpgm
\tv_exp_f32_e32 v1, v1
    .private_segment_fixed_size: 24
    .vgpr_count:     270
    .vgpr_spill_count: 3
"""  # fmt: skip


def test_gcn_is_read_alike() -> None:
    loop = hot_loop(parse_gcn(GCN))

    assert loop is not None
    counts = count(loop.instructions)
    assert (counts.mma, counts.ex2, counts.fp32, counts.shared, counts.other) == (1, 1, 12, 2, 1)
    assert counts.total == 17, "s_nop is no work"
    assert counts.shared_bytes == 16 + 4
    assert counts.mma_flops == 2 * 32 * 32 * 8


def test_registers_and_spills_are_found() -> None:
    assert gcn_usage(GCN) == (270, 24)
    assert gcn_usage(GCN.replace("size: 24", "size: 0")) == (270, 12)
    assert cubin_usage(" Function k:\n  REG:255 STACK:88 SHARED:0 LOCAL:0") == (255, 88)


def test_a_report_without_registers_is_an_error() -> None:
    with pytest.raises(ValueError, match="REG"):
        cubin_usage("nothing")
