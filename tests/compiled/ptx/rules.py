"""What each elementwise PTX instruction computes in a lane, from the PTX ISA manual.

A rule is written once, as an expression that is valid both in C (core.c) and on numpy arrays (numbers.py). Both define
the same functions; integers wrap. Approximate instructions are computed almost exactly and rounded once: `ex2.approx`
and `div.full` have an error of up to 2 units in the last place on a GPU, which the budgets of the cases include.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Bits of an operand in a register.
WIDTHS = {
    "pred": 1, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "f32": 32, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip


class Rule(NamedTuple):
    """The types of result and operands, and an expression in a, b and c."""

    result: str
    operands: tuple[str, ...]
    expression: str


def _rules() -> Iterator[tuple[str, Rule]]:
    def rule(opcode: str, types: str, expression: str) -> tuple[str, Rule]:
        result, *operands = types.split()
        return opcode, Rule(result, tuple(operands), expression)

    # Integers.
    for t in ("s16", "u16", "s32", "u32", "s64", "u64"):
        yield rule(f"add.{t}", f"{t} {t} {t}", "a + b")
        yield rule(f"sub.{t}", f"{t} {t} {t}", "a - b")
        yield rule(f"mul.lo.{t}", f"{t} {t} {t}", "a * b")
        yield rule(f"mad.lo.{t}", f"{t} {t} {t} {t}", "a * b + c")
        yield rule(f"min.{t}", f"{t} {t} {t}", "choose(a < b, a, b)")
        yield rule(f"max.{t}", f"{t} {t} {t}", "choose(a > b, a, b)")
    yield rule("min.relu.s32", "s32 s32 s32", "choose((a < 0) | (b < 0), 0, choose(a < b, a, b))")
    for t, wide in (("s32", "s64"), ("u32", "u64")):
        yield rule(f"mul.wide.{t}", f"{wide} {t} {t}", f"to_{wide}(a) * to_{wide}(b)")
        yield rule(f"mad.wide.{t}", f"{wide} {t} {t} {wide}", f"to_{wide}(a) * to_{wide}(b) + c")
        yield rule(f"mul.hi.{t}", f"{t} {t} {t}", f"to_{t}((to_{wide}(a) * to_{wide}(b)) >> 32)")
        yield rule(f"div.{t}", f"{t} {t} {t}", f"divide_{t}(a, b)")
        yield rule(f"rem.{t}", f"{t} {t} {t}", f"remainder_{t}(a, b)")
    for t in ("s32", "s64"):
        yield rule(f"neg.{t}", f"{t} {t}", "0 - a")
        yield rule(f"abs.{t}", f"{t} {t}", "choose(a < 0, 0 - a, a)")
    yield rule("popc.b32", "u32 u32", "ones(a)")
    for t in ("u32", "s32"):
        yield rule(f"bfe.{t}", f"{t} {t} u32 u32", f"field_{t}(a, b, c)")
    yield rule("prmt.b32", "u32 u32 u32 u32", "permute(a, b, c)")

    # Bits.
    for bits in ("b16", "b32", "b64"):
        t = "u" + bits[1:]
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            yield rule(f"{name}.{bits}", f"{t} {t} {t}", f"a {sign} b")
        yield rule(f"not.{bits}", f"{t} {t}", "~a")
        yield rule(f"shl.{bits}", f"{t} {t} u32", f"shift_left_{t}(a, b)")
        yield rule(f"selp.{bits}", f"{t} {t} {t} pred", "choose(c, a, b)")
        for name in (bits, t, "s" + bits[1:]):
            yield rule(f"mov.{name}", f"{t} {t}", "a")
    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        yield rule(f"shr.{t}", f"{t} {t} u32", f"shift_right_{t}(a, b)")
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        yield rule(f"{name}.pred", "pred pred pred", f"a {sign} b")
    yield rule("not.pred", "pred pred", "a ^ 1")
    yield rule("mov.pred", "pred pred", "a")
    for t in ("f32", "f64"):
        yield rule(f"mov.{t}", f"{t} {t}", "a")
        yield rule(f"selp.{t}", f"{t} {t} {t} pred", "choose(c, a, b)")

    # Floating point. NaN results are the canonical NaN.
    for t in ("f32", "f64"):
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            for suffix in ("", ".rn"):
                yield rule(f"{name}{suffix}.{t}", f"{t} {t} {t}", f"canonical_{t}(a {sign} b)")
        yield rule(f"fma.rn.{t}", f"{t} {t} {t} {t}", f"canonical_{t}(fma_{t}(a, b, c))")
        yield rule(f"min.{t}", f"{t} {t} {t}", f"least_{t}(a, b)")
        yield rule(f"max.{t}", f"{t} {t} {t}", f"largest_{t}(a, b)")
        yield rule(f"neg.{t}", f"{t} {t}", f"negative_{t}(a)")
        yield rule(f"abs.{t}", f"{t} {t}", f"absolute_{t}(a)")
    yield rule("max.NaN.f32", "f32 f32 f32", "canonical_f32(choose((a != a) | (b != b), a + b, largest_f32(a, b)))")
    yield rule("min.NaN.f32", "f32 f32 f32", "canonical_f32(choose((a != a) | (b != b), a + b, least_f32(a, b)))")
    yield rule("fma.rn.ftz.f32", "f32 f32 f32 f32", "flush(canonical_f32(fma_f32(flush(a), flush(b), flush(c))))")
    yield rule("fma.rn.bf16", "u16 u16 u16 u16", "bf16_of_odd(fma_odd(bf16(a), bf16(b), bf16(c)))")
    for name, sign in (("add", "+"), ("mul", "*")):
        yield rule(f"{name}.bf16", "u16 u16 u16", f"bf16_of_odd(to_f64(bf16(a)) {sign} to_f64(bf16(b)))")
    yield rule("mul.f16", "u16 u16 u16", "f16_of(f16(a) * f16(b))")
    yield rule("div.full.f32", "f32 f32 f32", "canonical_f32(a / b)")
    yield rule("ex2.approx.f32", "f32 f32", "canonical_f32(power_of_two(a))")
    yield rule("ex2.approx.ftz.f32", "f32 f32", "flush(canonical_f32(power_of_two(flush(a))))")
    yield rule("rcp.approx.ftz.f64", "f64 f64", "reciprocal_of_high_half(a)")

    # Comparisons. Without `u` they are false for NaN.
    for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
            yield rule(f"setp.{name}.{t}", f"pred {t} {t}", f"a {sign} b")
        for t in ("f32", "f64"):
            ordered = f"(a {sign} b) & (a == a) & (b == b)"
            yield rule(f"setp.{name}.{t}", f"pred {t} {t}", ordered)
            yield rule(f"setp.{name}u.{t}", f"pred {t} {t}", f"(a {sign} b) | (a != a) | (b != b)")
        if name in ("eq", "ne"):
            for bits in ("b16", "b32", "b64"):
                yield rule(f"setp.{name}.{bits}", f"pred u{bits[1:]} u{bits[1:]}", f"a {sign} b")
        for t in ("f16", "bf16"):
            ordered = f"({t}(a) {sign} {t}(b)) & ({t}(a) == {t}(a)) & ({t}(b) == {t}(b))"
            yield rule(f"setp.{name}.{t}", "pred u16 u16", ordered)
            unordered = f"({t}(a) {sign} {t}(b)) | ({t}(a) != {t}(a)) | ({t}(b) != {t}(b))"
            yield rule(f"setp.{name}u.{t}", "pred u16 u16", unordered)
    for t in ("f32", "f64"):
        yield rule(f"setp.nan.{t}", f"pred {t} {t}", "(a != a) | (b != b)")
        yield rule(f"setp.num.{t}", f"pred {t} {t}", "(a == a) & (b == b)")

    # Conversions.
    yield rule("cvt.f32.bf16", "f32 u16", "bf16(a)")
    yield rule("cvt.f32.f16", "f32 u16", "f16(a)")
    yield rule("cvt.rn.bf16.f32", "u16 f32", "bf16_of(a)")
    yield rule("cvt.rn.f16.f32", "u16 f32", "f16_of(a)")
    yield rule("cvt.rn.bf16x2.f32", "u32 f32 f32", "to_u32(bf16_of(b)) | to_u32(bf16_of(a)) << 16")
    yield rule("cvt.rn.f16x2.f32", "u32 f32 f32", "to_u32(f16_of(b)) | to_u32(f16_of(a)) << 16")
    yield rule("cvt.rna.tf32.f32", "u32 f32", "tf32_of(a)")
    yield rule("cvt.f64.f32", "f64 f32", "canonical_f64(to_f64(a))")
    yield rule("cvt.rn.f32.f64", "f32 f64", "canonical_f32(to_f32(a))")
    for t in ("s32", "u32", "s64", "u64"):
        yield rule(f"cvt.rn.f32.{t}", f"f32 {t}", "to_f32(a)")
    for result in ("u16", "s16", "u32", "s32", "u64", "s64"):
        for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
            if result != t:
                yield rule(f"cvt.{result}.{t}", f"{result} {t}", f"to_{result}(a)")
    yield rule("cvt.s16.s8", "s16 u16", "low_byte(a)")
    yield rule("cvt.s8.s32", "s16 s32", "low_byte(a)")

    # The address of a parameter stays what it is.
    yield rule("cvta.param.u64", "u64 u64", "a")

    # Parts of mov with vectors.
    yield rule("pack.b32", "u32 u16 u16", "to_u32(a) | to_u32(b) << 16")
    yield rule("pack.b64", "u64 u32 u32", "to_u64(a) | to_u64(b) << 32")
    yield rule("low.b32", "u16 u32", "to_u16(a)")
    yield rule("high.b32", "u16 u32", "to_u16(a >> 16)")
    yield rule("low.b64", "u32 u64", "to_u32(a)")
    yield rule("high.b64", "u32 u64", "to_u32(a >> 32)")


RULES = dict(_rules())
