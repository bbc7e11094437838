"""What the PTX executor reports beside numbers, each on a small kernel, in C and in numpy."""

from __future__ import annotations

import pytest
import torch

from compiled.execution import FINITE, NAN
from compiled.small_ptx import run

pytestmark = pytest.mark.parametrize("in_c", [True, False], ids=["c", "numpy"])

# The address of this thread's word in %r2 (shared), %rd7 (first argument) and %rd6 (second argument).
WORDS = """
\tshl.b32 \t%r2, %r1, 2;
\tmul.wide.u32 \t%rd8, %r1, 4;
\tadd.s64 \t%rd7, %rd1, %rd8;
\tadd.s64 \t%rd6, %rd2, %rd8;
"""
# Every warp reads what the next one has written.
EXCHANGE = """
\tst.shared.b32 \t[%r2], %r1;
{between}
\txor.b32 \t%r3, %r2, 128;
\tld.shared.b32 \t%r4, [%r3];
\tst.global.b32 \t[%rd7], %r4;
\tret;
"""
COPY = """
\tmov.b32 \t%r5, 16;
\tshl.b32 \t%r2, %r1, 4;
\tmul.wide.u32 \t%rd8, %r1, 16;
\tadd.s64 \t%rd5, %rd1, %rd8;
\tcp.async.cg.shared.global \t[ %r2 + 0 ], [ %rd5 + 0 ], 16, %r5;
{between}
\tld.shared.b32 \t%r4, [%r2];
\tst.global.b32 \t[%rd6], %r4;
\tret;
"""


def words(count: int) -> torch.Tensor:
    return torch.full((count,), -1, dtype=torch.int32)


def kinds(found: list) -> set[str]:
    return {finding.kind for finding in found}


def test_a_barrier_orders_two_warps(in_c: bool) -> None:
    out = words(64)
    code = WORDS.replace("%rd2", "%rd1") + EXCHANGE.format(between="\tbar.sync \t0;")
    assert run(code, [out], in_c=in_c, warps=2) == []
    assert out.tolist() == [*range(32, 64), *range(32)]


def test_without_it_a_race_is_reported(in_c: bool) -> None:
    code = WORDS.replace("%rd2", "%rd1") + EXCHANGE.format(between="")
    assert kinds(run(code, [words(64)], in_c=in_c, warps=2)) == {"RACE"}


def test_so_is_a_race_between_lanes_without_a_warp_barrier(in_c: bool) -> None:
    code = WORDS.replace("%rd2", "%rd1") + EXCHANGE.replace("128", "4")
    assert kinds(run(code.format(between=""), [words(32)], in_c=in_c)) == {"RACE_IN_WARP"}
    assert run(code.format(between="\tbar.warp.sync \t-1;"), [words(32)], in_c=in_c) == []


def test_a_write_after_a_read_by_another_warp_is_a_race(in_c: bool) -> None:
    code = (
        WORDS.replace("%rd2", "%rd1")
        + """
\tst.shared.b32 \t[%r2], %r1;
\tbar.sync \t0;
\txor.b32 \t%r3, %r2, 128;
\tld.shared.b32 \t%r4, [%r3];
\tst.shared.b32 \t[%r2], %r4;
\tst.global.b32 \t[%rd7], %r4;
\tret;
"""
    )
    assert kinds(run(code, [words(64)], in_c=in_c, warps=2)) == {"RACE"}


WAITED = "\tcp.async.commit_group;\n\tcp.async.wait_group \t0;"


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (WAITED, set()),
        ("\tcp.async.commit_group;", {"COPY_UNDER_WAY"}),
        ("\tcp.async.commit_group;\n\tcp.async.wait_group \t1;", {"COPY_UNDER_WAY"}),
        ("\tcp.async.wait_group \t0;", {"COPY_UNDER_WAY"}),  # not committed
        (WAITED.replace("wait_group \t0", "wait_group \t1") + "\n\tcp.async.commit_group;\n" + WAITED[-25:], set()),
    ],
    ids=["waited", "not_waited", "waited_for_less", "not_committed", "waited_later"],
)
def test_a_copy_is_visible_when_its_group_has_been_waited_for(in_c: bool, between: str, found: set[str]) -> None:
    source, out = torch.arange(128, dtype=torch.int32), words(32)
    assert kinds(run(WORDS + COPY.format(between=between), [source, out], in_c=in_c)) == found
    assert (out.tolist() == list(range(0, 128, 4))) == (not found)


def test_a_waited_copy_still_needs_a_barrier_for_other_warps(in_c: bool) -> None:
    source, out = torch.arange(256, dtype=torch.int32), words(64)
    across = WORDS + COPY.replace(
        "ld.shared.b32 \t%r4, [%r2]", "xor.b32 \t%r2, %r2, 512;\n\tld.shared.b32 \t%r4, [%r2]"
    )
    assert kinds(run(across.format(between=WAITED), [source, out], in_c=in_c, warps=2)) == {"RACE"}
    assert run(across.format(between=WAITED + "\n\tbar.sync \t0;"), [source, out], in_c=in_c, warps=2) == []


def test_bytes_beyond_the_given_ones_are_copied_as_zeros(in_c: bool) -> None:
    source, out = torch.arange(1, 129, dtype=torch.int32), words(32)
    code = WORDS + COPY.format(between=WAITED).replace(
        "mov.b32 \t%r5, 16", "shr.u32 \t%r5, %r1, 4;\n\tshl.b32 \t%r5, %r5, 4"
    )
    assert run(code, [source, out], in_c=in_c) == []
    assert out.tolist() == [0] * 16 + list(range(65, 129, 4))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("\tst.global.b32 \t[%rd7+4], %r1;\n\tst.global.b32 \t[%rd7], %r1;", {"OUTSIDE", "UNEQUAL_BITS"}),
        ("\tst.global.b32 \t[%rd7+2], %r1;\n\tst.global.b32 \t[%rd7], %r1;", {"MISALIGNED"}),
        ("\tst.global.b32 \t[%rd1], %r1;", {"UNEQUAL_BITS"}),
        ("\tst.global.b32 \t[%rd1], 7;", None),
        ("\tld.shared.b32 \t%r4, [%r2+1000];\n\tst.global.b32 \t[%rd7], %r1;", {"SHARED_OUTSIDE"}),
        ("\tsetp.lt.u32 \t%p1, %r1, 16;\n\t@%p1 bar.sync \t0;\n\tst.global.b32 \t[%rd7], %r1;", {"BARRIER"}),
        ("\tsetp.lt.u32 \t%p1, %r1, 16;\n\t@%p1 shfl.sync.bfly.b32 \t%r4, %r1, 1, 31, -1;\n"
         "\tst.global.b32 \t[%rd7], %r1;", {"CONVERGENCE"}),
    ],
    ids=["outside", "misaligned", "unequal_bits", "immediate", "shared_outside", "half_a_barrier", "half_a_shuffle"],
)  # fmt: skip
def test_wrong_accesses_are_reported(in_c: bool, code: str, found: set[str] | None) -> None:
    code = WORDS.replace("%rd2", "%rd1") + code + "\n\tret;"
    if found is None:  # a store takes registers only
        with pytest.raises(ValueError, match="registers are expected"):
            run(code, [words(32)], in_c=in_c)
    else:
        assert kinds(run(code, [words(32)], in_c=in_c)) == found


def test_writes_to_inputs_and_between_programs_are_reported(in_c: bool) -> None:
    both = WORDS + "\tst.global.b32 \t[%rd7], %r1;\n\tst.global.b32 \t[%rd6], %r1;\n\tret;"
    assert kinds(run(both, [words(32), words(32)], in_c=in_c)) == {"INPUT_WRITTEN"}
    alone = WORDS.replace("%rd2", "%rd1") + "\tst.global.b32 \t[%rd7], %r1;\n\tret;"
    assert kinds(run(alone, [words(32)], in_c=in_c, grid=2)) == {"WRITTEN_TWICE"}
    read = WORDS.replace("%rd2", "%rd1") + "\tld.global.b32 \t%r3, [%rd7];\n\tst.global.b32 \t[%rd7], %r1;\n\tret;"
    assert kinds(run(read, [words(32)], in_c=in_c, grid=2)) == {"READ_OF_OTHER_PROGRAM", "WRITTEN_TWICE"}


def test_warps_that_leave_before_a_barrier_are_reported(in_c: bool) -> None:
    code = (
        WORDS.replace("%rd2", "%rd1")
        + """
\tst.global.b32 \t[%rd7], %r1;
\tsetp.lt.u32 \t%p1, %r1, 32;
\t@%p1 ret;
\tbar.sync \t0;
\tret;
"""
    )
    assert kinds(run(code, [words(64)], in_c=in_c, warps=2)) == {"BARRIER"}


def test_an_endless_loop_ends(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled.ptx.execute.BUDGET", 1000)
    assert kinds(run("$L__1:\n\tbra.uni \t$L__1;\n\tret;", [words(1)], in_c=in_c)) == {"UNFINISHED"}


def test_lanes_that_diverge_meet_again(in_c: bool) -> None:
    # Each lane takes as many turns as its number, and all shuffle afterwards.
    code = (
        WORDS.replace("%rd2", "%rd1")
        + """
\tmov.b32 \t%r3, 0;
$L__1:
\tadd.s32 \t%r3, %r3, 2;
\tshl.b32 \t%r4, %r1, 1;
\tsetp.lt.s32 \t%p1, %r3, %r4;
\t@%p1 bra \t$L__1;
\tshfl.sync.bfly.b32 \t%r5, %r3, 1, 31, -1;
\tst.global.b32 \t[%rd7], %r5;
\tret;
"""
    )
    out = words(32)
    assert run(code, [out], in_c=in_c) == []
    assert out.tolist() == [max(2, 2 * (lane ^ 1)) for lane in range(32)]


def test_registers_and_shared_memory_start_as_poison(in_c: bool) -> None:
    code = (
        WORDS.replace("%rd2", "%rd1")
        + """
\tld.shared.b32 \t%r4, [%r2];
\tand.b32 \t%r4, %r4, %r77;
\tst.global.b32 \t[%rd7], %r4;
\tret;
"""
    )
    for settings in (NAN, FINITE):
        out = words(32)
        assert run(code, [out], in_c=in_c, settings=settings) == []
        assert {x & 0xFFFF_FFFF for x in out.tolist()} == {settings.poison}
