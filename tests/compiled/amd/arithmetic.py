"""Functions of the rules in numpy: the same names and the same bits as in arithmetic.h."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy arrays of one value per lane


def u32(x: Array) -> Array:
    return np.asarray(x).astype(np.uint32)


def i32(x: Array) -> Array:
    return np.asarray(x).astype(np.int32)


def u64(x: Array) -> Array:
    return np.asarray(x).astype(np.uint64)


def i64(x: Array) -> Array:
    return np.asarray(x).astype(np.int64)


def f32(x: Array) -> Array:
    return np.asarray(x).astype(np.float32)


def f64(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


sel = np.where
no = np.logical_not


def result32(x: Array) -> Array:
    """Bits of fp32 numbers, with one pattern for all NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FC0_0000), f32(x).view(np.uint32))


def result64(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint64(0x7FF8_0000_0000_0000), f64(x).view(np.uint64))


def result16(x: Array) -> Array:
    return np.where(np.isnan(x), np.uint32(0x7E00), f32(x).astype(np.float16).view(np.uint16).astype(np.uint32))


def half_of(x: Array) -> Array:
    return u32(x).astype(np.uint16).view(np.float16).astype(np.float32)


def f16_toward_zero(x: Array) -> Array:
    x = f32(x)
    near = x.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)
    bits = near.view(np.uint16).astype(np.uint32)
    bits = np.where(beyond, bits - 1, bits)
    return np.where(np.isnan(x), np.uint32(0x7E00), bits)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a·b + c with one rounding: the product is exact in fp64, and the sum is rounded to odd before it becomes fp32."""
    product, c = f64(a) * f64(b), f64(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (error != 0) & even
    return f32(np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total))


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a·b + c from the exact product in two parts; ties between two roundings may fall to the other neighbour."""
    splitter = 134217729.0
    high_a, high_b = (x * splitter - (x * splitter - x) for x in (a, b))
    product = a * b
    rest = ((high_a * high_b - product) + high_a * (b - high_b) + (a - high_a) * high_b) + (a - high_a) * (b - high_b)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    return np.where(np.isfinite(rest) & np.isfinite(error), total + (error + rest), total)


def max32(a: Array, b: Array) -> Array:
    equal = (f32(a).view(np.uint32) & f32(b).view(np.uint32)).view(np.float32)
    return sel(a != a, b, sel(b != b, a, sel(a > b, a, sel(b > a, b, equal))))


def min32(a: Array, b: Array) -> Array:
    equal = (f32(a).view(np.uint32) | f32(b).view(np.uint32)).view(np.float32)
    return sel(a != a, b, sel(b != b, a, sel(a < b, a, sel(b < a, b, equal))))


def max64(a: Array, b: Array) -> Array:
    return sel(a != a, b, sel(b != b, a, sel(a > b, a, b)))


def min64(a: Array, b: Array) -> Array:
    return sel(a != a, b, sel(b != b, a, sel(a < b, a, b)))


def med32(a: Array, b: Array, c: Array) -> Array:
    some_nan = (a != a) | (b != b) | (c != c)
    return sel(some_nan, min32(min32(a, b), c), max32(min32(a, b), min32(max32(a, b), c)))


def flush(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def exp2_of(x: Array) -> Array:
    return f32(np.exp2(f64(x)))


def log2_of(x: Array) -> Array:
    return f32(np.log2(f64(x)))


sqrt_of, rint_of, floor_of, trunc_of = np.sqrt, np.rint, np.floor, np.trunc


def ldexp64(x: Array, n: Array) -> Array:
    return np.ldexp(x, np.clip(n, -3000, 3000))


def ldexp32(x: Array, n: Array) -> Array:
    return f32(np.ldexp(f64(x), np.clip(n, -400, 400)))


def frexp_mant(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def frexp_exp(x: Array) -> Array:
    return np.where(np.isfinite(x), np.frexp(x)[1], 0)


def _clipped(x: Array, low: float, high: float) -> Array:
    return np.trunc(np.clip(np.where(np.isnan(x), 0.0, f64(x)), low, high))


def u32_of(x: Array) -> Array:
    return u32(_clipped(x, 0.0, 2.0**32 - 1))


def i32_of64(x: Array) -> Array:
    return i32(_clipped(x, -(2.0**31), 2.0**31 - 1))


i32_of = i32_of64


def popcount(x: Array) -> Array:
    return u32(np.bitwise_count(u32(x)))


def leading_zeros(x: Array) -> Array:
    return np.where(x == 0, np.uint32(32), u32(32 - np.frexp(f64(x))[1]))


def trailing_zeros(x: Array) -> Array:
    return np.where(x == 0, np.uint32(32), popcount((x & -i32(x).view(np.uint32)) - np.uint32(1)))


def bfrev(x: Array) -> Array:
    for shift, mask in ((1, 0x5555_5555), (2, 0x3333_3333), (4, 0x0F0F_0F0F)):
        x = (x >> np.uint32(shift) & np.uint32(mask)) | (x & np.uint32(mask)) << np.uint32(shift)
    return x.byteswap()


def bfe_u32(x: Array, offset: Array, width: Array) -> Array:
    mask = np.where(width > 31, np.uint32(0xFFFF_FFFF), (np.uint32(1) << (width & np.uint32(31))) - np.uint32(1))
    return (x >> offset) & mask


def bfe_i32(x: Array, offset: Array, width: Array) -> Array:
    width = np.minimum(width, np.uint32(32) - offset)
    up, down = (np.uint32(32) - offset - width) & np.uint32(31), i32((np.uint32(32) - width) & np.uint32(31))
    return np.where(width == 0, np.int32(0), (x << up).view(np.int32) >> down)


def perm(high: Array, low: Array, selector: Array) -> Array:
    both, found = u64(high) << np.uint64(32) | u64(low), np.zeros_like(u32(low))
    for i in range(4):
        s = (selector >> np.uint32(8 * i)) & np.uint32(255)
        byte = both >> u64(np.minimum(s, 7) * 8) & np.uint64(255)
        sign = both >> u64(16 * (np.clip(s, 8, 11) - 8) + 15) & np.uint64(1)
        byte = np.where(s < 8, byte, np.where(s < 12, sign * np.uint64(255), np.where(s == 12, np.uint64(0), 255)))
        found |= u32(byte) << np.uint32(8 * i)
    return found


def _exponent(x: Array) -> Array:
    return i32(f32(x).view(np.uint32) >> np.uint32(23) & np.uint32(255))


def _denormal(x: Array) -> Array:
    return (x != 0) & (np.abs(x) < 2.0**-126)


def div_scale_flag(under: Array, over: Array) -> Array:
    far = _exponent(over) - _exponent(under) >= 96
    small = no(_denormal(under)) & _denormal(f64(over) / f64(under))
    return no((over == 0) | (under == 0)) & (far | small)


def div_scale(x: Array, under: Array, over: Array) -> Array:
    inverse, quotient = 1.0 / f64(under), f64(over) / f64(under)
    up, down = ldexp32(x, 64), ldexp32(x, -64)
    found = sel(_exponent(over) <= 23, up, x)
    found = sel(_denormal(quotient), sel(x == over, up, x), found)
    found = sel(_denormal(inverse), down, found)
    found = sel(_denormal(inverse) & _denormal(quotient), sel(x == under, up, x), found)
    found = sel(_denormal(under), up, found)
    found = sel(_exponent(over) - _exponent(under) >= 96, sel(x == under, up, x), found)
    return sel((over == 0) | (under == 0), np.float32(np.nan), found)


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    found = fma32(a, b, c)
    return sel(scaled, ldexp32(found, sel(_exponent(c) > 127, 64, -64)), found)


def div_fixup(quotient: Array, under: Array, over: Array) -> Array:
    negative = (f32(under).view(np.uint32) ^ f32(over).view(np.uint32)) >> np.uint32(31)
    sign = sel(negative, np.float32(-1), np.float32(1))
    found = sign * np.abs(quotient)
    found = sel(_exponent(over) - _exponent(under) < -150, sign * np.float32(0), found)
    found = sel(np.isinf(under) | (over == 0), sign * np.float32(0), found)
    found = sel((under == 0) | np.isinf(over), sign * np.float32(np.inf), found)
    bad = (over != over) | (under != under) | ((under == 0) & (over == 0)) | (np.isinf(under) & np.isinf(over))
    return sel(bad, np.float32(np.nan), found)
