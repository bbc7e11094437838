// Functions of the rules in C; vectors.py has the same in numpy. The typedefs double as casts.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;
typedef int64_t i64;
typedef float f32;
typedef double f64;

#define u32(x) ((u32)(x))
#define i32(x) ((i32)(x))
#define u64(x) ((u64)(x))
#define i64(x) ((i64)(x))
#define f32(x) ((f32)(x))
#define f64(x) ((f64)(x))
#define sel(c, a, b) ((c) ? (a) : (b))
#define no(x) (!(x))

static inline u32 bits32(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline u64 bits64(f64 x) { u64 y; memcpy(&y, &x, 8); return y; }
static inline f32 float_of(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
// All NaN results have one pattern.
static inline u32 result32(f32 x) { return x != x ? 0x7fc00000u : bits32(x); }
static inline u64 result64(f64 x) { return x != x ? 0x7ff8000000000000u : bits64(x); }

static inline f32 half_of(u32 x) {
    u32 sign = (x & 0x8000u) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    return float_of(sign | bits32((f32)mantissa * 0x1p-24f));
}

static inline u32 result16(f32 x) {
    u32 b = bits32(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a < 0x38800000u) return sign | (u32)rint(float_of(a) * 0x1p24);
    return sign | ((a + 0xfffu + ((a >> 13) & 1)) >> 13) - 0x1c000u;
}

static inline u32 f16_toward_zero(f32 x) {
    u32 b = bits32(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7e00u;
    if (a == 0x7f800000u) return sign | 0x7c00u;
    if (a >= 0x47800000u) return sign | 0x7bffu;
    if (a < 0x38800000u) return sign | (u32)(float_of(a) * 0x1p24);
    return sign | (a >> 13) - 0x1c000u;
}

static inline f32 bf16_of(u32 x) { return float_of(x << 16); }
static inline f32 fma32(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
static inline f64 fma64(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
// A NaN operand is dropped; +0 is above −0.
static inline f32 max32(f32 a, f32 b) { return a != a ? b : b != b ? a : a > b ? a : b > a ? b : float_of(bits32(a) & bits32(b)); }
static inline f32 min32(f32 a, f32 b) { return a != a ? b : b != b ? a : a < b ? a : b < a ? b : float_of(bits32(a) | bits32(b)); }
static inline f64 max64(f64 a, f64 b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static inline f64 min64(f64 a, f64 b) { return a != a ? b : b != b ? a : a < b ? a : b; }
static inline f32 med32(f32 a, f32 b, f32 c) {
    if (a != a || b != b || c != c) return min32(min32(a, b), c);
    return max32(min32(a, b), min32(max32(a, b), c));
}
static inline f32 flush(f32 x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
static inline f32 exp2_of(f32 x) { return (f32)exp2((f64)x); }
static inline f32 log2_of(f32 x) { return (f32)log2((f64)x); }
static inline f64 sqrt_of(f64 x) { return sqrt(x); }
static inline f64 rint_of(f64 x) { return rint(x); }
static inline f64 floor_of(f64 x) { return floor(x); }
static inline f64 trunc_of(f64 x) { return trunc(x); }
static inline f64 ldexp64(f64 x, i32 n) { return ldexp(x, n < -3000 ? -3000 : n > 3000 ? 3000 : n); }
static inline f32 ldexp32(f32 x, i32 n) { return (f32)ldexp64((f64)x, n < -400 ? -400 : n > 400 ? 400 : n); }
static inline f64 frexp_mant(f64 x) { int n; return isfinite(x) ? frexp(x, &n) : x; }
static inline i32 frexp_exp(f64 x) { int n = 0; if (isfinite(x)) frexp(x, &n); return n; }
static inline u32 u32_of(f32 x) { return x != x || x <= 0 ? 0 : x >= 0x1p32f ? 0xffffffffu : (u32)x; }
static inline i32 i32_of64(f64 x) { return x != x ? 0 : x <= -0x1p31 ? INT32_MIN : x >= 0x1p31 ? INT32_MAX : (i32)x; }
static inline i32 i32_of(f32 x) { return i32_of64(x); }
static inline u32 popcount(u32 x) { return (u32)__builtin_popcount(x); }
static inline u32 leading_zeros(u32 x) { return x ? (u32)__builtin_clz(x) : 32; }
static inline u32 trailing_zeros(u32 x) { return x ? (u32)__builtin_ctz(x) : 32; }
static inline u32 bfrev(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
static inline u32 bfe_u32(u32 x, u32 offset, u32 width) {
    return width == 0 ? 0 : width > 31 ? x >> offset : (x >> offset) & ((1u << width) - 1);
}
static inline i32 bfe_i32(u32 x, u32 offset, u32 width) {
    if (width == 0) return 0;
    if (offset + width >= 32) return (i32)x >> offset;
    return (i32)(x << (32 - offset - width)) >> (32 - width);
}
static inline u32 perm(u32 high, u32 low, u32 selector) {
    u64 bytes = (u64)high << 32 | low;
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = selector >> 8 * i & 255, byte;
        if (s < 8) byte = bytes >> 8 * s & 255;
        else if (s < 12) byte = bytes >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
        else byte = s == 12 ? 0 : 255;
        found |= byte << 8 * i;
    }
    return found;
}

// Division: v_div_scale prepares operands whose quotient or reciprocal would not be a normal number, v_div_fmas undoes
// it, v_div_fixup handles the special cases.
static inline i32 exponent_of(f32 x) { return bits32(x) >> 23 & 255; }
static inline int denormal(f64 x) { return x != 0 && fabs(x) < 0x1p-126; }
static inline i32 div_scale_flag(f32 under, f32 over) {
    if (over == 0 || under == 0) return 0;
    if (exponent_of(over) - exponent_of(under) >= 96) return 1;
    if (denormal(under)) return 0;
    return denormal((f64)over / (f64)under);
}
static inline f32 div_scale(f32 x, f32 under, f32 over) {
    if (over == 0 || under == 0) return NAN;
    f64 inverse = 1.0 / (f64)under, quotient = (f64)over / (f64)under;
    if (exponent_of(over) - exponent_of(under) >= 96) return x == under ? ldexp32(x, 64) : x;
    if (denormal(under)) return ldexp32(x, 64);
    if (denormal(inverse) && denormal(quotient)) return x == under ? ldexp32(x, 64) : x;
    if (denormal(inverse)) return ldexp32(x, -64);
    if (denormal(quotient)) return x == over ? ldexp32(x, 64) : x;
    return exponent_of(over) <= 23 ? ldexp32(x, 64) : x;
}
static inline f32 div_fmas(f32 a, f32 b, f32 c, int scaled) {
    f32 found = fma32(a, b, c);
    return scaled ? ldexp32(found, exponent_of(c) > 127 ? 64 : -64) : found;
}
static inline f32 div_fixup(f32 quotient, f32 under, f32 over) {
    f32 sign = (bits32(under) ^ bits32(over)) >> 31 ? -1.0f : 1.0f;
    if (over != over || under != under) return NAN;
    if (under == 0 && over == 0) return NAN;
    if (isinf(under) && isinf(over)) return NAN;
    if (under == 0 || isinf(over)) return sign * INFINITY;
    if (isinf(under) || over == 0) return sign * 0.0f;
    if (exponent_of(over) - exponent_of(under) < -150) return sign * 0.0f;
    return sign * fabsf(quotient);
}
