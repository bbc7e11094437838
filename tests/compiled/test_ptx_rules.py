"""PTX instructions one at a time: C against numpy on many numbers, examples by hand, and what must be refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from compiled.launching import Argument
from compiled.ptx.encode import encode
from compiled.ptx.parse import PtxError, parse
from compiled.ptx.rules import RULES, WIDTHS
from compiled.small_ptx import run, text_of

PREFIX = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}


def rows_at(register: int, pointer: int, size: int) -> str:
    """Code for the address of this thread's element."""
    return f"\tmul.wide.u32 \t%rd8, %r1, {size};\n\tadd.s64 \t%rd{register}, %rd{pointer}, %rd8;\n"


def numbers(kind: str, seed: int) -> Tensor:
    """32 numbers of a type, among them the special ones."""
    generator = np.random.default_rng(seed)
    bits = WIDTHS[kind]
    if kind == "f32":
        some = np.float32(generator.normal(size=32) * 10.0 ** generator.integers(-6, 7, 32))
        some[:10] = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3.4e38, 0.5, -1.5]
        return torch.from_numpy(generator.permutation(some))
    if kind == "f64":
        some = generator.normal(size=32) * 10.0 ** generator.integers(-9, 9, 32)
        some[:5] = [0.0, -0.0, math.inf, math.nan, 1.0]
        return torch.from_numpy(generator.permutation(some))
    some = generator.integers(0, 1 << min(bits, 63), 32, dtype=np.uint64)
    some[:6] = [0, 1, (1 << bits) - 1, 1 << (bits - 1), 5, 31]
    some = generator.permutation(some)
    if bits == 1:
        return torch.from_numpy((some & 1).astype(np.int32))
    return torch.from_numpy(some.astype(f"u{bits // 8}").view(f"i{bits // 8}"))


# Written by the encoder for mov with vectors.
INNER = {f"{name}.b{bits}" for name in ("pack", "low", "high") for bits in (32, 64)}


@pytest.mark.parametrize("opcode", sorted(RULES.keys() - INNER))
def test_c_and_numpy_agree_on_every_bit(opcode: str) -> None:
    rule = RULES[opcode]
    given = [numbers(kind, seed) for seed, kind in enumerate(rule.operands)]
    if opcode.startswith(("shl", "shr", "bfe")):  # amounts around the width
        for place in range(1, len(given)):
            given[place] = torch.arange(32, dtype=torch.int32) * (3 - place)
    results = []
    for in_c in (True, False):
        bits = WIDTHS[rule.result]
        out = torch.zeros(32, dtype={64: torch.int64, 16: torch.int16}.get(bits, torch.int32))
        body, sources = "", []
        for place, kind in enumerate(rule.operands):
            size = max(4 if WIDTHS[kind] == 1 else WIDTHS[kind] // 8, 1)
            body += rows_at(7, place + 1, size)
            if WIDTHS[kind] == 1:
                body += (
                    f"\tld.global.b32 \t%r{20 + place}, [%rd7];\n\tsetp.ne.b32 \t%p{place + 1}, %r{20 + place}, 0;\n"
                )
                sources.append(f"%p{place + 1}")
            else:
                register = f"{PREFIX[WIDTHS[kind]]}{place + 4}" if WIDTHS[kind] < 64 else f"%rd{5 if place else 6}"
                register = register if place < 2 or WIDTHS[kind] < 64 else "%rd0"
                body += f"\tld.global.b{8 * size} \t{register}, [%rd7];\n"
                sources.append(register)
        result = "%rd7" if bits == 64 else f"{PREFIX[bits]}8"
        body += f"\t{opcode} \t{result}, {', '.join(sources)};\n"
        if bits == 1:
            body, result, bits = body + "\tselp.b32 \t%r9, 1, 0, %p8;\n", "%r9", 32
        body += f"\tmul.wide.u32 \t%rd8, %r1, {bits // 8};\n\tadd.s64 \t%rd8, %rd{len(given) + 1}, %rd8;\n"
        body += f"\tst.global.b{bits} \t[%rd8], {result};\n\tret;\n"
        assert run(body, [*given, out], in_c=in_c) == []
        results.append(out)
    assert torch.equal(*results)


def computed(opcode: str, *operands: str, result: str = "%r4") -> int:
    """The result of an instruction on immediate operands."""
    out = torch.zeros(1, dtype=torch.int32)
    body = "".join(f"\tmov.b32 \t%r{50 + i}, {x};\n" for i, x in enumerate(operands))
    named = ", ".join(f"%r{50 + i}" for i in range(len(operands)))
    body += (
        f"\t{opcode} \t{result}, {named};\n\tsetp.eq.b32 \t%p1, %r1, 0;\n\t@%p1 st.global.b32 \t[%rd1], %r4;\n\tret;\n"
    )
    assert run(body, [out], in_c=True) == []
    return int(out.item()) & 0xFFFF_FFFF


def f32(x: float) -> str:
    return f"0f{int(np.float32(x).view(np.uint32)):08X}"


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("prmt.b32", ("0x33221100", "0x77665544", "0x5410"), 0x55441100),
        ("prmt.b32", ("0x80", "0", "0x0008"), 0x808080FF),  # the sign of byte 0, and three copies of it
        ("bfe.s32", ("0xF0", "4", "4"), 0xFFFFFFFF),
        ("bfe.u32", ("0xF0", "4", "4"), 0xF),
        ("mul.hi.u32", ("0xFFFFFFFF", "0xFFFFFFFF"), 0xFFFFFFFE),
        ("div.s32", ("-7", "2"), (-3) & 0xFFFFFFFF),
        ("shl.b32", ("1", "32"), 0),
        ("shr.s32", ("-8", "40"), 0xFFFFFFFF),
        ("max.f32", (f32(math.nan), f32(2.0)), 0x40000000),
        ("max.NaN.f32", (f32(math.nan), f32(2.0)), 0x7FFFFFFF),
        ("max.f32", (f32(-0.0), f32(0.0)), 0),
        ("cvt.rn.bf16x2.f32", (f32(1.0), f32(-2.0)), 0x3F80C000),  # the first operand is the upper half
        ("cvt.rn.f16x2.f32", (f32(65519.9), f32(2.0**-25)), 0x7BFF0000),
        ("ex2.approx.ftz.f32", (f32(-3.0),), int(np.float32(0.125).view(np.uint32))),
        ("fma.rn.ftz.f32", (f32(1e-20), f32(1e-20), f32(0.0)), 0),
        ("popc.b32", ("0xF00F",), 8),
        ("min.relu.s32", ("-3", "5"), 0),
        ("min.relu.s32", ("7", "5"), 5),
    ],
)  # fmt: skip
def test_examples_from_the_manual(opcode: str, operands: tuple[str, ...], expected: int) -> None:
    assert computed(opcode, *operands) == expected


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("add.s33 \t%r2, %r3, %r4", "unknown instruction add.s33"),
        ("add.sat.s32 \t%r2, %r3, %r4", "unknown instruction add.sat.s32"),
        ("add.s32 \t%r2, %r3", "add.s32 with 2 operands instead of 3"),
        ("add.s32 \t%r2, %r3, %rd4", "%rd4 has 64 bits instead of (32,)"),
        ("add.s32 \t%q2, %r3, %r4", "unknown register %q2"),
        ("add.f32 \t%r2, %r3, 1", "is no number of 32 bits"),
        ("ld.global.ca.b32 \t%r2, [%rd2]", "unknown instruction ld.global.ca.b32"),
        ("ld.global.b32 \t%r2, [%r2]", "%r2 has 32 bits instead of (64,)"),
        ("bra \t$L__nowhere", "unknown label"),
        ("bar.sync \t1", "another barrier than 0"),
        ("cp.async.cg.shared.global \t[%r2], [%rd2], 8, %r3", "copies of 8 bytes"),
        ("mov.b32 \t%r2, %clock", "unknown operand '%clock'"),
        ("shfl.sync.bfly.b32 \t%r2|%p1, %r3, 1, 31, -1", "a register is expected instead of Pair"),
        ("wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 \t{%r2}, %rd2, %rd3, 1, 1, 1, 0, 0", "unknown instr"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.bf16.bf16 \t{%r2}, %rd2, %rd3, 1, 1, 1, 0, 0", "unknown instr"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \t{%r2, %r3}, %rd2, %rd3, 1, 1, 1, 0, 0", "4 registers"),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \t{%r2, %r3, %r4, %r5}, %rd2, %rd3, 1, 1, 1, 0",
            "with 7 operands instead of 8",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \t{%r2, %r3, %r4, %r5}, %rd2, %rd3, 1, 2, 1, 0, 0",
            "a factor with sign 2",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 \t{%r2, %r3, %r4, %r5}, %rd2, %rd3, 1, 1, 1, 0, 3",
            "transposed by 3",
        ),
        ("wgmma.wait_group.sync.aligned \t%r2", "a number is expected"),
        ("wgmma.fence.sync", "unknown instruction wgmma.fence.sync"),
        ("fence.proxy.async", "unknown instruction fence.proxy.async"),
        ("elect.sync \t%r2, -1", "two results are expected"),
        ("mbarrier.init.shared.b64 \t[%r2], 1", "unknown instruction mbarrier.init.shared.b64"),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 \t%rd2, [%r2], 16", "the state of an arrival"),
        (
            "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes \t[%r2], [%rd2], [%r3]",
            "a map and coordinates are expected",
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes \t[%r2], [%rd2, {%r3}], [%r3]",
            "2 registers are expected",
        ),
        ("mov.b64 \t%rd2, p_0", "a register is expected"),
        ("@complete ret", "unknown predicate 'complete'"),
    ],
)
def test_what_is_unknown_is_an_error_that_names_it(statement: str, told: str) -> None:
    text = text_of(f"\t{statement};\n\tret;", 1)
    with pytest.raises(PtxError, match=r"line 1\d: ") as error:
        encode(parse(text), [Argument("p_0", "*i8", 0)], 1, 0)
    assert told in str(error.value)


def test_parameters_must_match_the_arguments() -> None:
    program = parse(text_of("\tret;", 1))
    with pytest.raises(PtxError, match="3 parameters for 2 arguments"):
        encode(program, [Argument("a", "*i8", 0), Argument("b", "i32", 0)], 1, 0)
    with pytest.raises(PtxError, match="the parameter p_0 is u64, but a is i32"):
        encode(program, [Argument("a", "i32", 0)], 1, 0)
