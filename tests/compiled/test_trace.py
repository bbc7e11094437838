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


OUT = torch.zeros(32, dtype=torch.int32)  # the same in every run, as its address is a value too


def traced(body: str) -> tuple[str, Trace]:
    text = text_of(body, 1)
    kernel, arguments = Kernel("small", "sm_80", text, 1024, 1, ()), [Argument("p_0", "*i32", OUT.data_ptr())]
    memory = GlobalMemory([OUT], [OUT])
    trace = execute(kernel, arguments, memory, Findings(), 1, NAN._replace(traced=True)).trace
    assert trace is not None
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
