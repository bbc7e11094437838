"""Loops and instruction kinds, on short listings."""

from __future__ import annotations

import pytest

from scripts.static.compiling import cubin_usage, gcn_usage
from scripts.static.counts import Phases, Structure, classify, count, find_phases
from scripts.static.loops import loop_nest, parse_gcn, parse_sass


def sass(*lines: str) -> str:
    """A listing in nvdisasm format; entries that start with a dot are labels."""
    return "\n".join(
        line if line.startswith(".") else f"        /*{16 * number:04x}*/                   {line} ;"
        for number, line in enumerate(lines)
    )


BODY = ["FADD R1, R2, R3"] * 16
CLEAR_AND_EDGE = sass(
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


def test_loops_are_named_by_the_order_in_which_they_run() -> None:
    found = find_phases(parse_sass(CLEAR_AND_EDGE), Structure(("hot", "after"), repairs=True))

    hot, edge, repair = found.hot, found.after, found.repair
    assert (hot.mma, hot.ex2, hot.fp32, hot.alu, hot.other, hot.total) == (2, 1, 16, 0, 1, 20)
    assert hot.mma_flops == 2 * 2 * 16 * 8 * 16
    assert (edge.mma, edge.ex2, edge.fp32, edge.alu, edge.total) == (2, 1, 16, 5, 25)
    assert (repair.alu, repair.total) == (20, 21)
    assert found.before.total == 0
    assert found.once == 2, "the first instruction and the last; nothing leads to the stop behind it"


def test_the_order_is_that_of_running_and_not_of_addresses() -> None:
    text = sass(
        "BRA `(.L_x_2)",
        ".L_x_1:", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 2, *BODY, "@P0 BRA `(.L_x_1)", "EXIT",
        ".L_x_2:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", *BODY, "@P0 BRA `(.L_x_2)", "BRA `(.L_x_1)",
    )  # fmt: skip

    found = find_phases(parse_sass(text), Structure(("hot", "after")))

    assert (found.hot.mma, found.after.mma) == (1, 2)


def test_loops_of_several_sweeps_add_up_by_phase() -> None:
    text = sass(*(line for n in range(4) for line in (f".L_x_{n}:", *BODY[n:], *BODY, f"@P0 BRA `(.L_x_{n})")), "EXIT")

    found = find_phases(parse_sass(text), Structure(("hot", "after"), sweeps=2))

    assert (found.hot.total, found.after.total) == (33 + 31, 32 + 30)


@pytest.mark.parametrize(
    "structure", [Structure(("hot", "after")), Structure(("before", "hot", "after"), sweeps=2, repairs=True)]
)
def test_a_kernel_with_other_loops_than_its_text_is_an_error(structure: Structure) -> None:
    with pytest.raises(ValueError, match=r"\[20, 25, 21\] instructions, expected the loops \['"):
        find_phases(parse_sass(CLEAR_AND_EDGE), structure)


def nested(*inner: str) -> str:
    """A loop nested in a loop."""
    return sass(
        ".L_x_0:", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 4, *BODY,
        ".L_x_1:", *inner, *BODY, "@P1 BRA `(.L_x_1)",
        "@P0 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip


def test_a_loop_over_heads_is_counted_around_that_over_tiles() -> None:
    text = nested("HMMA.16816.F32.BF16 R4, R8, R12, R4")

    found = find_phases(parse_sass(text), Structure(("hot",), heads_around=True))

    assert (found.hot.mma, found.hot.total) == (1, 18)
    assert (found.around.mma, found.around.total) == (4, 21)


@pytest.mark.parametrize(("loads", "passes"), [(1, 8), (2, 4)])
def test_a_loop_inside_that_over_tiles_counts_as_often_as_it_runs(loads: int, passes: int) -> None:
    text = nested(*["LDG.E R1, [R2]"] * loads)

    found = find_phases(parse_sass(text), Structure(("hot",), trips_inside=8))

    assert found.hot.total == 21 + passes * (loads + 17)


def test_a_wait_behind_the_end_that_jumps_back_is_no_loop_of_its_own() -> None:
    text = sass(
        ".L_x_0:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R1], R2", "@!P1 BRA `(.L_x_8)",
        ".L_x_1:", "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", *BODY, "@P0 BRA `(.L_x_0)",
        "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8]", "EXIT",
        ".L_x_8:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R1], R2", "@P1 BRA `(.L_x_1)", "BRA `(.L_x_8)",
    )  # fmt: skip

    (loop,) = loop_nest(parse_sass(text)).inner

    assert loop.inner == (), "a wait is part of the loop that it stands in"
    assert len(loop.instructions) == 20 + 3
    assert count(loop.instructions).mma == 1, "the product behind the loop is not in it"


def test_a_jump_that_ptxas_writes_as_a_call_leaves_the_loop() -> None:
    text = sass(
        ".L_x_0:", "HMMA.16816.F32.BF16 R4, R8, R12, R4", *BODY, "@P0 CALL.REL.NOINC `(.L_x_1)", "BRA `(.L_x_0)",
        ".L_x_1:", *["HMMA.16816.F32.BF16 R4, R8, R12, R4"] * 3, "EXIT",
    )  # fmt: skip

    (loop,) = loop_nest(parse_sass(text)).inner

    assert count(loop.instructions).mma == 1


def test_straight_code_has_no_loop() -> None:
    found = find_phases(parse_sass(sass("FADD R1, R2, R3", "EXIT")), Structure())

    assert found == Phases(once=2)


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
\ts_cbranch_scc0 .LBB0_3
.LBB0_2:
\ts_endpgm
.LBB0_3:
""" + "\tv_add_f32_e32 v1, v2, v3\n" * 18 + """\ts_cbranch_scc0 .LBB0_3
\ts_branch .LBB0_2
.Lfunc_end0:
\tv_exp_f32_e32 v1, v1
    .private_segment_fixed_size: 24
    .vgpr_count:     270
    .vgpr_spill_count: 3
"""  # fmt: skip


def test_gcn_is_read_alike() -> None:
    found = find_phases(parse_gcn(GCN), Structure(("hot", "after")))

    counts = found.hot
    assert (counts.mma, counts.ex2, counts.fp32, counts.shared, counts.other) == (1, 1, 12, 2, 1)
    assert counts.total == 17, "s_nop is no work"
    assert counts.shared_bytes == 16 + 4
    assert counts.mma_flops == 2 * 32 * 32 * 8


def test_what_lies_behind_the_end_of_the_program_is_read_to_the_end_of_the_function() -> None:
    found = find_phases(parse_gcn(GCN), Structure(("hot", "after")))

    assert (found.after.fp32, found.after.total) == (18, 19)


def test_registers_and_spills_are_found() -> None:
    assert gcn_usage(GCN) == (270, 24)
    assert gcn_usage(GCN.replace("size: 24", "size: 0")) == (270, 12)
    assert cubin_usage(" Function k:\n  REG:255 STACK:88 SHARED:0 LOCAL:0") == (255, 88)


def test_a_report_without_registers_is_an_error() -> None:
    with pytest.raises(ValueError, match="REG"):
        cubin_usage("nothing")
