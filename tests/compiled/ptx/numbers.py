"""The functions of the rules on numpy arrays; core.c defines the same ones for one lane."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

Array = np.ndarray

# Coefficients of 2^f on [−1/2, 1/2], as ln(2)^k / k!, for the same sum in C.
LN2 = 0.6931471805599453
POWERS = [1.0]
for _order in range(1, 14):
    POWERS.append(POWERS[-1] * LN2 / _order)


def choose(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition != 0, a, b)


def _cast(dtype: Any) -> Any:
    return lambda a: a.astype(dtype)


to_u16, to_s16, to_u32, to_s32 = _cast(np.uint16), _cast(np.int16), _cast(np.uint32), _cast(np.int32)
to_u64, to_s64, to_f32, to_f64 = _cast(np.uint64), _cast(np.int64), _cast(np.float32), _cast(np.float64)


def low_byte(a: Array) -> Array:
    return a.astype(np.int8).astype(np.int16)


# Integers.


def _shift(left: bool, bits: int) -> Any:
    def shift(a: Array, b: Array) -> Array:
        amount = np.minimum(b, bits - 1).astype(a.dtype)
        moved = a << amount if left else a >> amount
        if a.dtype.kind == "i":  # copies of the sign remain
            return moved
        return np.where(b >= bits, a.dtype.type(0), moved)

    return shift


shift_left_u16, shift_left_u32, shift_left_u64 = (_shift(True, bits) for bits in (16, 32, 64))
shift_right_u16, shift_right_u32, shift_right_u64 = (_shift(False, bits) for bits in (16, 32, 64))
shift_right_s16, shift_right_s32, shift_right_s64 = (_shift(False, bits) for bits in (16, 32, 64))


def divide_u32(a: Array, b: Array) -> Array:
    return np.where(b == 0, np.uint32(0xFFFF_FFFF), a // np.where(b == 0, np.uint32(1), b))


def remainder_u32(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - divide_u32(a, b) * b)


def divide_s32(a: Array, b: Array) -> Array:
    wide, by = a.astype(np.int64), b.astype(np.int64)
    quotient = np.abs(wide) // np.where(by == 0, 1, np.abs(by))
    return np.where(by == 0, -1, np.where((wide < 0) != (by < 0), -quotient, quotient)).astype(np.int32)


def remainder_s32(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - divide_s32(a, b) * b)


def ones(a: Array) -> Array:
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8)).reshape(-1, 32).sum(1).astype(np.uint32)


def field_u32(a: Array, b: Array, c: Array) -> Array:
    place, length = b & 255, c & 255
    return shift_right_u32(a, place) & ~shift_left_u32(np.full_like(a, 0xFFFF_FFFF), length)


def field_s32(a: Array, b: Array, c: Array) -> Array:
    place, length = b & 255, c & 255
    last = np.minimum(place + length - 1, 31).astype(np.int32)
    found = field_u32(a.view(np.uint32), b, c)
    above = shift_left_u32(np.full_like(found, 0xFFFF_FFFF), length)
    signed = np.where((a >> last) & 1 == 1, found | above, found)
    return np.where(length == 0, 0, signed).astype(np.uint32).view(np.int32)


def permute(a: Array, b: Array, c: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << 32
    result = np.zeros_like(a)
    for place in range(4):
        selector = (c >> (4 * place)) & 15
        byte = ((both >> (8 * (selector & 7)).astype(np.uint64)) & 255).astype(np.uint32)
        byte = np.where(selector & 8 != 0, (byte >> 7) * 255, byte).astype(np.uint32)
        result |= byte << (8 * place)
    return result


# Floating point.


def canonical_f32(a: Array) -> Array:
    return np.where(a != a, np.uint32(0x7FFF_FFFF), a.view(np.uint32)).view(np.float32)


def canonical_f64(a: Array) -> Array:
    return np.where(a != a, np.uint64(0x7FF8_0000_0000_0000), a.view(np.uint64)).view(np.float64)


def negative_f32(a: Array) -> Array:
    return (a.view(np.uint32) ^ 0x8000_0000).view(np.float32)


def absolute_f32(a: Array) -> Array:
    return (a.view(np.uint32) & 0x7FFF_FFFF).view(np.float32)


def negative_f64(a: Array) -> Array:
    return (a.view(np.uint64) ^ np.uint64(1 << 63)).view(np.float64)


def absolute_f64(a: Array) -> Array:
    return (a.view(np.uint64) & np.uint64((1 << 63) - 1)).view(np.float64)


def largest_f32(a: Array, b: Array) -> Array:
    larger = np.where(a == b, np.where(np.signbit(a), b, a), np.where(a > b, a, b))
    return canonical_f32(np.where(a != a, b, np.where(b != b, a, larger)))


def least_f32(a: Array, b: Array) -> Array:
    return negative_or_nan(largest_f32(negative_f32(a), negative_f32(b)))


def negative_or_nan(a: Array) -> Array:
    return canonical_f32(negative_f32(a))


def largest_f64(a: Array, b: Array) -> Array:
    larger = np.where(a == b, np.where(np.signbit(a), b, a), np.where(a > b, a, b))
    return canonical_f64(np.where(a != a, b, np.where(b != b, a, larger)))


def least_f64(a: Array, b: Array) -> Array:
    return canonical_f64(negative_f64(largest_f64(negative_f64(a), negative_f64(b))))


def flush(a: Array) -> Array:
    bits = a.view(np.uint32)
    return np.where(bits & 0x7F80_0000 == 0, bits & 0x8000_0000, bits).astype(np.uint32).view(np.float32)


def fma_odd(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of fp32 numbers in fp64, rounded to odd: rounding once more gives the correctly rounded result."""
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + step, bits).view(np.float64)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    return fma_odd(a, b, c).astype(np.float32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    plain = a * b + c
    return np.array([_fma(*numbers) for numbers in zip(a, b, c, plain, strict=True)])


def _fma(a: float, b: float, c: float, plain: float) -> float:
    if not np.isfinite(plain) or not (a * b) or plain == 0.0:
        return float(plain)
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def bf16(a: Array) -> Array:
    return (a.astype(np.uint32) << 16).view(np.float32)


def bf16_of(a: Array) -> Array:
    bits = a.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(a != a, 0x7FFF, rounded).astype(np.uint16)


def bf16_of_odd(a: Array) -> Array:
    """Round fp64 to bf16 by way of fp32, rounded to odd."""
    single = a.astype(np.float32)
    bits = single.view(np.int32)
    back = single.astype(np.float64)
    inexact = (back != a) & (bits & 1 == 0) & np.isfinite(single)
    step = np.where(np.abs(back) < np.abs(a), 1, -1)
    return bf16_of(np.where(inexact, bits + step, bits).astype(np.int32).view(np.float32))


def f16(a: Array) -> Array:
    return canonical_f32(a.astype(np.uint16).view(np.float16).astype(np.float32))


def f16_of(a: Array) -> Array:
    return np.where(a != a, 0x7FFF, a.astype(np.float16).view(np.uint16)).astype(np.uint16)


def tf32_of(a: Array) -> Array:
    """Round to nearest, ties away from zero, to 10 bits after the point."""
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFF_E000)
    return np.where(np.isfinite(a), rounded, bits).astype(np.uint32)


def power_of_two(a: Array) -> Array:
    x = np.where(a == a, np.clip(a, np.float32(-300.0), np.float32(300.0)), np.float32(0.0)).astype(np.float64)
    whole = np.rint(x)
    rest = x - whole
    total = np.full_like(x, POWERS[-1])
    for power in POWERS[-2::-1]:
        total = total * rest + power
    scale = ((whole.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(a == a, (total * scale).astype(np.float32), a)


def reciprocal_of_high_half(a: Array) -> Array:
    """The reciprocal of the upper half of the bits; the lower half of the result is 0."""
    high = np.uint64(0xFFFF_FFFF_0000_0000)
    found = 1.0 / (a.view(np.uint64) & high).view(np.float64)
    return (canonical_f64(found).view(np.uint64) & high).view(np.float64)


FUNCTIONS = {name: value for name, value in globals().items() if callable(value) and not name.startswith("_")}
