"""Bulk copies of boxes and barrier objects: what they copy, and what is reported, each on a small kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscale_kernels.flash.plan import Box as Unchecked
from compiled.execution import FINITE, NAN
from compiled.launching import Box, Map, map_of
from compiled.small_ptx import run

C_AND_NUMPY = pytest.mark.parametrize("in_c", [True, False], ids=["c", "numpy"])

OBJECT = 8192  # address of the barrier object
ROWS, COLUMNS = 8, 64  # of the box


def kinds(found: list) -> set[str]:
    return {finding.kind for finding in found}


def box_of(x: Tensor, width: int = 128) -> Map:
    """A map of a matrix that copies boxes whose rows are as long as the pattern."""
    columns = width // 2 or COLUMNS
    mode = {0: 0, 32: 1, 64: 2, 128: 3}[width]
    descriptor = TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, columns])
    return map_of(descriptor, Box((ROWS, columns), 2, mode))


# Thread 0 starts the object, expects the bytes and copies the box at (%r5, %r6) to address 0.
START = f"""
\tmov.b32 \t%r2, {OBJECT};
\tmov.b32 \t%r3, 0;
\tmov.b32 \t%r4, 0;
\tmov.b32 \t%r5, 0;
\tmov.b32 \t%r6, 0;
\tmov.b64 \t%rd4, m_0;
\tcvta.param.u64 \t%rd5, %rd4;
\tsetp.eq.b32 \t%p1, %r1, 0;
\t@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
"""
MEET = "\tbar.sync \t0;\n"
EXPECT = "\t@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;\n"
COPY = (
    "\t@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd5, {%r5, %r6}], [%r2];\n"
)
WAIT = """
{
\t.reg .pred complete;
\twaitLoop:
\tmbarrier.try_wait.parity.shared::cta.b64 complete, [%r2], %r4;
\t@!complete bra.uni waitLoop;
}
"""
# Every thread stores the 16 bytes at its place.
STORE = """
\tshl.b32 \t%r7, %r1, 4;
\tld.shared.v4.b32 \t{%r10, %r11, %r12, %r13}, [%r7];
\tmul.wide.u32 \t%rd8, %r1, 16;
\tadd.s64 \t%rd7, %rd1, %rd8;
\tst.global.v4.b32 \t[%rd7], {%r10, %r11, %r12, %r13};
"""
END = "\t@%p1 mbarrier.inval.shared::cta.b64 [%r2];\n"


def code_of(**changes: str) -> str:
    """The program of a copy; `changes` replaces its parts."""
    parts = {"before": "", "start": START, "meet": MEET, "expect": EXPECT, "copy": COPY, "between": "", "wait": WAIT}
    parts |= {"after": "", "store": STORE, "last": MEET, "end": END}
    return "".join((parts | changes).values()) + "\tret;"


def copied(code: str, in_c: bool, width: int = 128, settings: object = NAN) -> tuple[list, Tensor, Tensor]:
    """Findings, the bytes in shared memory as [units of 16 bytes, 8], and the matrix."""
    x = torch.arange(12 * 72, dtype=torch.int16).reshape(12, 72).view(torch.bfloat16)
    out = torch.zeros(128, 8, dtype=torch.int16)
    found = run(
        code,
        [x, out],
        in_c=in_c,
        warps=4,
        shared=8704,
        maps=[box_of(x, width)],
        settings=settings,  # type: ignore[arg-type]
    )
    return found, out, x.view(torch.int16)


def with_output(code: str) -> str:
    """The output is the second tensor."""
    return code.replace("%rd1, %rd8", "%rd2, %rd8")


@C_AND_NUMPY
@pytest.mark.parametrize("width", [128, 64, 32, 0])
def test_units_of_16_bytes_are_permuted_in_the_pattern(in_c: bool, width: int) -> None:
    columns = width // 2 or COLUMNS
    code = with_output(code_of(expect=EXPECT.replace("1024", str(ROWS * columns * 2))))
    found, out, x = copied(code, in_c, width)
    assert found == []
    units = out.reshape(-1)[: ROWS * columns].reshape(ROWS, columns // 8, 8)
    for row in range(ROWS):
        for unit in range(columns // 8):
            place = unit ^ (row * width // 128) % (width // 16) if width else unit
            assert torch.equal(units[row, place], x[row, 8 * unit : 8 * unit + 8])


@C_AND_NUMPY
@pytest.mark.parametrize("start", [(16, 6), (-8, -3), (68, 0), (0, 12), (3, 1)])
def test_zeros_are_copied_outside_of_the_tensor(in_c: bool, start: tuple[int, int]) -> None:
    moved = START.replace("%r5, 0;", f"%r5, {start[0]};").replace("%r6, 0;", f"%r6, {start[1]};")
    found, out, x = copied(with_output(code_of(start=moved)), in_c, 0)
    assert found == []
    padded = torch.zeros(12 + 2 * 16, 72 + 2 * 64, dtype=torch.int16)
    padded[16:28, 64:136] = x
    expected = padded[16 + start[1] :, 64 + start[0] :][:ROWS, :COLUMNS]
    got = torch.zeros(ROWS, COLUMNS, dtype=torch.int16)
    got[: expected.shape[0], : expected.shape[1]] = expected
    assert torch.equal(out[:64].reshape(ROWS, COLUMNS), got)


@C_AND_NUMPY
def test_phases_alternate(in_c: bool) -> None:
    again = "\tfence.proxy.async.shared::cta;\n" + MEET + EXPECT + "\tmov.b32 \t%r6, 4;\n" + COPY
    again += "\tmov.b32 \t%r4, 1;\n" + WAIT
    found, out, x = copied(with_output(code_of(after=STORE.replace("st.global", "// ") + again)), in_c, 0)
    assert found == []
    assert torch.equal(out[:64].reshape(ROWS, COLUMNS), x[4:12, :64])


READ = "\tshl.b32 \t%r7, %r1, 4;\n\tld.shared.b32 \t%r8, [%r7];\n"
WRITE = "\tshl.b32 \t%r7, %r1, 4;\n\tst.shared.b32 \t[%r7], %r1;\n"
PROXY_FENCE = "\tfence.proxy.async.shared::cta;\n"
FIRST_WARP_WAITS = "\tsetp.ge.u32 \t%p2, %r1, 32;\n\t@%p2 bra \t$L__on;\n" + WAIT + "$L__on:\n"
OTHER_PARITY, PARITY = (f"\tmov.b32 \t%r4, {parity};\n{WAIT}" for parity in (1, 0))
LESS = EXPECT.replace("1024", "1008")


@C_AND_NUMPY
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, set()),
        ({"wait": "", "last": WAIT + MEET}, {"COPY_UNDER_WAY", "NOT_WAITED"}),
        ({"wait": FIRST_WARP_WAITS}, {"NOT_WAITED"}),
        ({"wait": FIRST_WARP_WAITS + MEET}, set()),
        ({"wait": OTHER_PARITY, "last": PARITY + MEET}, {"COPY_UNDER_WAY", "NEVER_DONE"}),
        ({"wait": "", "store": "", "last": "", "end": ""}, {"LEFT_UNDER_WAY"}),
        ({"expect": EXPECT.replace("1024", "1040")}, {"NEVER_DONE"}),
        ({"expect": LESS}, {"NEVER_DONE"}),
        ({"copy": ""}, {"NEVER_DONE"}),
        ({"expect": "", "copy": COPY + EXPECT}, set()),  # bytes may be announced later
        ({"before": WRITE}, {"PROXY"}),
        ({"before": WRITE + PROXY_FENCE}, set()),
        ({"before": PROXY_FENCE + WRITE}, {"PROXY"}),
        ({"before": WRITE, "meet": MEET + PROXY_FENCE}, set()),
        ({"before": READ}, {"PROXY"}),
        ({"before": READ + PROXY_FENCE}, set()),
        ({"before": WRITE, "meet": "\tbar.warp.sync \t-1;\n" + PROXY_FENCE}, {"NOT_WAITED", "RACE"}),
        ({"between": READ, "wait": WAIT + MEET}, {"COPY_UNDER_WAY", "NOT_WAITED"}),
        ({"between": MEET + WRITE, "wait": WAIT + MEET}, {"COPY_UNDER_WAY", "NOT_WAITED"}),
    ],
    ids=[
        "right", "read_early", "one_warp_waits", "one_warp_waits_and_tells", "wrong_parity", "left",
        "too_many_bytes", "too_few_bytes", "no_copy", "announced_later", "written_before", "written_and_fenced",
        "fenced_and_written", "fenced_behind_barrier", "read_before", "read_and_fenced", "no_barrier",
        "read_during", "written_during",
    ],
)  # fmt: skip
def test_accesses_around_a_copy(in_c: bool, changes: dict[str, str], found: set[str]) -> None:
    reported = copied(with_output(code_of(**changes)), in_c)[0]
    assert kinds(reported) == found


@C_AND_NUMPY
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"start": START.replace("\t@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n", "")}, {"BARRIER_OBJECT"}),
        ({"start": START + START[-46:]}, {"BARRIER_OBJECT"}),
        ({"start": START.replace("[%r2], 1", "[%r2], 0")}, {"BARRIER_OBJECT"}),
        ({"start": START.replace(str(OBJECT), str(OBJECT + 4))}, {"MISALIGNED", "BARRIER_OBJECT"}),
        ({"start": START.replace(str(OBJECT), "8704")}, {"SHARED_OUTSIDE", "BARRIER_OBJECT"}),
        ({"expect": EXPECT + EXPECT.replace("1024", "0")}, {"BARRIER_OBJECT"}),
        ({"after": "\tld.shared.b32 \t%r8, [%r2+4];\n"}, {"BARRIER_OBJECT"}),
        ({"after": "\tst.shared.b32 \t[%r2], %r3;\n"}, {"BARRIER_OBJECT", "RACE"}),
        ({"wait": "", "store": "", "last": ""}, {"BARRIER_OBJECT", "LEFT_UNDER_WAY"}),
        ({"meet": ""}, {"RACE"}),  # other warps wait for an object that they may not see
        ({"last": ""}, {"BARRIER_OBJECT", "NOT_WAITED"}),  # or that has ended
        ({"start": START.replace("%r3, 0;", "%r3, 64;")}, {"MISALIGNED", "NEVER_DONE"}),
        ({"start": START.replace("%r3, 0;", "%r3, 8064;")}, {"SHARED_OUTSIDE", "NEVER_DONE"}),
        ({"start": START.replace("mov.b64 \t%rd4, m_0", "mov.b64 \t%rd4, 0")}, {"DESCRIPTOR", "NEVER_DONE"}),
        ({"copy": COPY.replace("2d", "1d").replace(", %r6", "")}, {"DESCRIPTOR", "NEVER_DONE"}),
        ({"copy": COPY.replace("%p1", "%p3"), "meet": MEET + "\tsetp.eq.b32 \t%p3, %r1, 32;\n"}, set()),
        ({"wait": WAIT.replace("%r4;", "%r1;")}, {"CONVERGENCE"}),
    ],
    ids=[
        "not_started", "started_twice", "no_arrivals", "misaligned_object", "object_outside", "too_many_arrivals",
        "object_read", "object_written", "ended_early", "no_barrier", "no_barrier_at_the_end", "misaligned", "outside",
        "unknown_map", "other_rank", "other_warp", "unequal_lanes",
    ],
)  # fmt: skip
def test_uses_of_a_barrier_object(in_c: bool, changes: dict[str, str], found: set[str]) -> None:
    assert kinds(copied(with_output(code_of(**changes)), in_c)[0]) == found


@pytest.mark.parametrize("settings", [NAN, FINITE], ids=["in_order", "reverse"])
@C_AND_NUMPY
def test_warps_wait_in_any_order(in_c: bool, settings: object) -> None:
    found, out, x = copied(with_output(code_of()), in_c, 0, settings)
    assert found == []
    assert torch.equal(out[:64].reshape(ROWS, COLUMNS), x[:8, :64])


@C_AND_NUMPY
def test_a_copy_into_a_factor_under_way_is_reported(in_c: bool) -> None:
    results = ", ".join(f"%r{40 + i}" for i in range(4))
    product = f"""
{PROXY_FENCE}\twgmma.fence.sync.aligned;
\tmov.b64 \t%rd6, {128 >> 4 << 16 | 256 >> 4 << 32};
\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{results}}}, %rd6, %rd6, 0, 1, 1, 0, 0;
\twgmma.commit_group.sync.aligned;
"""
    waited = "\twgmma.wait_group.sync.aligned 0;\n"
    assert kinds(copied(with_output(code_of(start=product + START, wait=waited + WAIT)), in_c)[0]) == {
        "FACTOR_UNDER_WAY"
    }
    assert copied(with_output(code_of(start=product + waited + START)), in_c)[0] == []


@pytest.mark.parametrize(
    ("shape", "strides", "box", "told"),
    [
        ((8, 64), (64, 1), Box((8, 60), 2, 0), "rows of 120 bytes"),
        ((8, 64), (64, 1), Box((8, 32), 2, 3), "rows of 64 bytes and a swizzle of 128"),
        ((8, 60), (60, 1), Box((8, 64), 2, 3), "multiples of 16 bytes"),
        ((8, 64), (64, 1), Box((512, 64), 2, 3), "a box of"),
        ((8, 64), (64, 1), Box((8, 64), 4, 3), "unknown descriptor"),
    ],
)
def test_the_driver_would_refuse_the_map(shape: tuple[int, ...], strides: tuple[int, ...], box: Box, told: str) -> None:
    x = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=told):
        map_of(Unchecked(x, shape, strides, [8, 64]), box)
