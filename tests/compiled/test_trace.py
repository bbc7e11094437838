"""Traces of small kernels: which instructions a change reaches, and where the difference ends."""

from __future__ import annotations

import pytest
import torch

from compiled.execution import NAN
from compiled.launching import Argument, Kernel
from compiled.memory import Findings, GlobalMemory
from compiled.ptx.execute import execute, library
from compiled.small_ptx import text_of
from compiled.trace import Trace

# The low byte of a number passes through shared memory.
BODY = """
\tshl.b32 \t%r2, %r1, 2;
\tmul.wide.u32 \t%rd2, %r1, 4;
\tadd.s64 \t%rd2, %rd1, %rd2;
\tadd.s32 \t%r3, %r1, 7;
\tand.b32 \t%r4, %r3, 255;
\tst.shared.b32 \t[%r2], %r4;
\tld.shared.b32 \t%r5, [%r2];
\tst.global.b32 \t[%rd2], %r5;
\tsetp.gt.u32 \t%p1, %r1, 99;
\t@%p1 st.shared.b32 \t[%r2], %r3;
\tret;
"""

pytestmark = pytest.mark.skipif(library() is None, reason="traces need a C compiler")


# A product of a warpgroup: the first factor is 0, the second one %r8.
PRODUCT = """
\tmov.b32 \t%r7, 0;
\tmov.b32 \t%r8, 5;
\tshl.b32 \t%r2, %r1, 4;
\tsetp.lt.u32 \t%p1, %r1, 16;
\tst.shared.v4.b32 \t[%r2], {%r7, %r7, %r7, %r7};
\t@%p1 st.shared.v4.b32 \t[%r2+2048], {%r8, %r8, %r8, %r8};
\tfence.proxy.async.shared::cta;
\tbar.sync \t0;
\tmov.b64 \t%rd5, 68720001024;
\tmov.b64 \t%rd6, 68720001152;
\twgmma.fence.sync.aligned;
\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r40, %r41, %r42, %r43}, %rd5, %rd6, 0, 1, 1, 0, 0;
\twgmma.commit_group.sync.aligned;
\twgmma.wait_group.sync.aligned 0;
\tshr.u32 \t%r3, %r40, 1;
\tret;
"""
# Thread 0 arrives at a barrier object, for which all threads wait.
WAIT = """
\tmov.b32 \t%r2, 0;
\tsetp.eq.b32 \t%p1, %r1, 0;
\t@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
\tbar.sync \t0;
\t@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 0;
waitLoop:
\tmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], %r2;
\t@!%p2 bra.uni waitLoop;
\tbar.sync \t0;
\t@%p1 mbarrier.inval.shared::cta.b64 [%r2];
\tret;
"""

OUT = torch.zeros(32, dtype=torch.int32)  # the same in every run, as its address is a value too


def traced(body: str, warps: int = 1, reverse: bool = False) -> tuple[str, Trace]:
    text = text_of(body, 1, 32 * warps)
    kernel, arguments = Kernel("small", "sm_80", text, 4096, warps, ()), [Argument("p_0", "*i32", OUT.data_ptr())]
    memory, findings = GlobalMemory([OUT], [OUT]), Findings()
    trace = execute(kernel, arguments, memory, findings, 1, NAN._replace(reverse=reverse, traced=True)).trace
    assert trace is not None
    assert not findings.count
    return text, trace


def line_of(text: str, statement: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if statement in line)


def test_a_difference_ends_where_the_changed_bits_are_dropped() -> None:
    text, before = traced(BODY)
    _, after = traced(BODY.replace("%r1, 7;", "%r1, 263;"))
    assert before.cone(after) == {line_of(text, "add.s32 \t%r3")}
    assert before.ends(after) == {line_of(text, "and.b32"), line_of(text, "@%p1 st.shared")}


def test_a_difference_reaches_the_output_through_shared_memory() -> None:
    text, before = traced(BODY)
    _, after = traced(BODY.replace("%r1, 7;", "%r1, 8;"))
    reached = ("add.s32 \t%r3", "and.b32", "\tst.shared", "ld.shared", "st.global")
    assert before.cone(after) == {line_of(text, statement) for statement in reached}


def test_a_trace_tells_false_guards_and_the_bytes_that_are_read() -> None:
    text, trace = traced(BODY)
    assert trace.idle[line_of(text, "@%p1 st.shared")]
    assert trace.loaded[line_of(text, "\tst.shared")] == 4 * 32


def test_a_product_of_a_warpgroup_reads_its_factors_and_writes_its_results() -> None:
    text, before = traced(PRODUCT, 4)
    second, product = line_of(text, "[%r2+2048]"), line_of(text, "wgmma.mma_async")
    assert before.loaded[second - 1] == 4 * 64 * 16 * 2  # each warp reads all of both factors
    assert before.loaded[second] == 4 * 8 * 16 * 2
    _, after = traced(PRODUCT.replace("%r8, 5;", "%r8, 6;"), 4)
    assert before.cone(after) == {line_of(text, "%r8, 5;"), second}
    assert before.ends(after) == {product}
    ones = PRODUCT.replace("%r7, 0;", "%r7, 1065369472;")
    _, before = traced(ones, 4)
    _, after = traced(ones.replace("%r8, 5;", "%r8, 1065369472;"), 4)
    assert {product, line_of(text, "shr.u32")} <= before.cone(after)


def test_a_wait_that_is_tried_again_is_traced_once() -> None:
    _, before = traced(WAIT, 4)
    _, after = traced(WAIT, 4, reverse=True)  # the other warps wait before thread 0 arrives
    assert not before.cone(after)
    assert not before.ends(after)
