"""What each arithmetic instruction of gfx942 computes, written once for both engines.

A rule is an expression over the operands a, b and c, and `m` (the bit of the lane in a mask operand). `core.py` turns
it into C, `vectors.py` evaluates it with numpy. Functions such as `sel` and `fma32` exist in both. Types: u32, i32,
f32, u64, i64, f64, and u16, i16, f16 in the low half of a register; an f16 operand is converted to fp32, where a sum
or product of two is exact enough to be rounded once.

The rules follow AMD's guide to the instruction set of MI300 (CDNA3). Where the hardware's rounding is not specified
(exp, log, rcp), a rule rounds the exact value once.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """One opcode: result and operand types, the expression, and for a second result its expression."""

    name: str
    result: str
    sources: tuple[str, ...]
    value: str
    flag: str = ""  # scc of a scalar instruction, carry-out of a vector instruction
    mask: bool = False  # the last source is a mask with a bit per lane


# Vector instructions: name, result, operands, expression [; carry-out]. "mask" is a bit per lane, in an SGPR pair.
_VECTOR = """
v_mov_b32 u32 u32 a
v_mov_b64 u64 u64 a
v_accvgpr_read_b32 u32 u32 a
v_accvgpr_write_b32 u32 u32 a
v_accvgpr_mov_b32 u32 u32 a
v_not_b32 u32 u32 ~a
v_bfrev_b32 u32 u32 bfrev(a)
v_add_u32 u32 u32,u32 a + b
v_add_u32:clamp u32 u32,u32 sel(a + b < a, u32(4294967295), a + b)
v_sub_u32 u32 u32,u32 a - b
v_sub_u32:clamp u32 u32,u32 sel(a < b, u32(0), a - b)
v_subrev_u32 u32 u32,u32 b - a
v_add3_u32 u32 u32,u32,u32 a + b + c
v_add_lshl_u32 u32 u32,u32,u32 (a + b) << (c & u32(31))
v_lshl_add_u32 u32 u32,u32,u32 (a << (b & u32(31))) + c
v_lshl_or_b32 u32 u32,u32,u32 (a << (b & u32(31))) | c
v_and_or_b32 u32 u32,u32,u32 (a & b) | c
v_or3_b32 u32 u32,u32,u32 a | b | c
v_xad_u32 u32 u32,u32,u32 (a ^ b) + c
v_and_b32 u32 u32,u32 a & b
v_or_b32 u32 u32,u32 a | b
v_xor_b32 u32 u32,u32 a ^ b
v_xnor_b32 u32 u32,u32 ~(a ^ b)
v_lshlrev_b32 u32 u32,u32 b << (a & u32(31))
v_lshrrev_b32 u32 u32,u32 b >> (a & u32(31))
v_ashrrev_i32 i32 u32,i32 b >> i32(a & u32(31))
v_lshlrev_b64 u64 u32,u64 b << u64(a & u32(63))
v_lshrrev_b64 u64 u32,u64 b >> u64(a & u32(63))
v_ashrrev_i64 i64 u32,i64 b >> i64(a & u32(63))
v_lshl_add_u64 u64 u64,u32,u64 (a << u64(b & u32(7))) + c
v_lshlrev_b16 u16 u16,u16 b << (a & u32(15))
v_lshrrev_b16 u16 u16,u16 b >> (a & u32(15))
v_ashrrev_i16 i16 u16,i16 b >> i32(a & u32(15))
v_add_u16 u16 u16,u16 a + b
v_sub_u16 u16 u16,u16 a - b
v_mul_lo_u16 u16 u16,u16 a * b
v_mul_lo_u32 u32 u32,u32 a * b
v_mul_hi_u32 u32 u32,u32 u32((u64(a) * u64(b)) >> u64(32))
v_mul_hi_i32 i32 i32,i32 i32((i64(a) * i64(b)) >> i64(32))
v_mul_u32_u24 u32 u32,u32 (a & u32(16777215)) * (b & u32(16777215))
v_mul_i32_i24 i32 i32,i32 ((a << 8) >> 8) * ((b << 8) >> 8)
v_mad_u32_u24 u32 u32,u32,u32 (a & u32(16777215)) * (b & u32(16777215)) + c
v_mad_i32_i24 i32 i32,i32,i32 ((a << 8) >> 8) * ((b << 8) >> 8) + c
v_bfe_u32 u32 u32,u32,u32 (a >> (b & u32(31))) & ((u32(1) << (c & u32(31))) - u32(1))
v_bfe_i32 i32 u32,u32,u32 bfe_i32(a, b & u32(31), c & u32(31))
v_bfi_b32 u32 u32,u32,u32 (a & b) | (~a & c)
v_perm_b32 u32 u32,u32,u32 perm(a, b, c)
v_alignbit_b32 u32 u32,u32,u32 u32(((u64(a) << u64(32)) | u64(b)) >> u64(c & u32(31)))
v_alignbyte_b32 u32 u32,u32,u32 u32(((u64(a) << u64(32)) | u64(b)) >> u64((c & u32(3)) * u32(8)))
v_max_i32 i32 i32,i32 sel(a > b, a, b)
v_min_i32 i32 i32,i32 sel(a < b, a, b)
v_max_u32 u32 u32,u32 sel(a > b, a, b)
v_min_u32 u32 u32,u32 sel(a < b, a, b)
v_max_i16 i16 i16,i16 sel(a > b, a, b)
v_min_i16 i16 i16,i16 sel(a < b, a, b)
v_max_u16 u16 u16,u16 sel(a > b, a, b)
v_min_u16 u16 u16,u16 sel(a < b, a, b)
v_max3_i32 i32 i32,i32,i32 sel(sel(a > b, a, b) > c, sel(a > b, a, b), c)
v_min3_i32 i32 i32,i32,i32 sel(sel(a < b, a, b) < c, sel(a < b, a, b), c)
v_max3_u32 u32 u32,u32,u32 sel(sel(a > b, a, b) > c, sel(a > b, a, b), c)
v_min3_u32 u32 u32,u32,u32 sel(sel(a < b, a, b) < c, sel(a < b, a, b), c)
v_bcnt_u32_b32 u32 u32,u32 popcount(a) + b
v_ffbh_u32 u32 u32 sel(a == u32(0), u32(4294967295), leading_zeros(a))
v_cndmask_b32 u32 u32,u32,mask sel(m, b, a)
v_add_co_u32 u32 u32,u32 a + b ; a + b < a
v_sub_co_u32 u32 u32,u32 a - b ; a < b
v_subrev_co_u32 u32 u32,u32 b - a ; b < a
v_addc_co_u32 u32 u32,u32,mask a + b + u32(m) ; u64(a) + u64(b) + u64(m) > u64(4294967295)
v_subb_co_u32 u32 u32,u32,mask a - b - u32(m) ; u64(b) + u64(m) > u64(a)
v_subbrev_co_u32 u32 u32,u32,mask b - a - u32(m) ; u64(a) + u64(m) > u64(b)
v_mad_u64_u32 u64 u32,u32,u64 u64(a) * u64(b) + c ; u64(a) * u64(b) + c < c
v_mad_i64_i32 i64 i32,i32,i64 i64(a) * i64(b) + c ; u64(0) > u64(0)
v_add_f32 f32 f32,f32 a + b
v_sub_f32 f32 f32,f32 a - b
v_subrev_f32 f32 f32,f32 b - a
v_mul_f32 f32 f32,f32 a * b
v_mul_legacy_f32 f32 f32,f32 sel((a == f32(0)) | (b == f32(0)), f32(0), a * b)
v_fma_f32 f32 f32,f32,f32 fma32(a, b, c)
v_fmac_f32 f32 f32,f32,f32 fma32(a, b, c)
v_fmaak_f32 f32 f32,f32,f32 fma32(a, b, c)
v_fmamk_f32 f32 f32,f32,f32 fma32(a, b, c)
v_max_f32 f32 f32,f32 max32(a, b)
v_min_f32 f32 f32,f32 min32(a, b)
v_max3_f32 f32 f32,f32,f32 max32(max32(a, b), c)
v_min3_f32 f32 f32,f32,f32 min32(min32(a, b), c)
v_med3_f32 f32 f32,f32,f32 med32(a, b, c)
v_exp_f32 f32 f32 flush(exp2_of(flush(a)))
v_log_f32 f32 f32 flush(log2_of(flush(a)))
v_rcp_f32 f32 f32 flush(f32(1) / flush(a))
v_rcp_iflag_f32 f32 f32 flush(f32(1) / flush(a))
v_rsq_f32 f32 f32 flush(f32(f64(1) / sqrt_of(f64(flush(a)))))
v_sqrt_f32 f32 f32 flush(f32(sqrt_of(f64(flush(a)))))
v_ldexp_f32 f32 f32,i32 ldexp32(a, b)
v_frexp_mant_f32 f32 f32 f32(frexp_mant(f64(a)))
v_frexp_exp_i32_f32 i32 f32 frexp_exp(f64(a))
v_rndne_f32 f32 f32 f32(rint_of(f64(a)))
v_floor_f32 f32 f32 f32(floor_of(f64(a)))
v_trunc_f32 f32 f32 f32(trunc_of(f64(a)))
v_div_fixup_f32 f32 f32,f32,f32 div_fixup(a, b, c)
v_div_fmas_f32 f32 f32,f32,f32,mask div_fmas(a, b, c, m)
v_div_scale_f32 f32 f32,f32,f32 div_scale(a, b, c) ; div_scale_flag(b, c)
v_cvt_f32_u32 f32 u32 f32(a)
v_cvt_f32_i32 f32 i32 f32(a)
v_cvt_f32_ubyte0 f32 u32 f32(a & u32(255))
v_cvt_u32_f32 u32 f32 u32_of(a)
v_cvt_i32_f32 i32 f32 i32_of(a)
v_cvt_f16_f32 f16 f32 a
v_cvt_f32_f16 f32 f16 a
v_cvt_f32_f64 f32 f64 f32(a)
v_cvt_f64_f32 f64 f32 f64(a)
v_cvt_f64_i32 f64 i32 f64(a)
v_cvt_f64_u32 f64 u32 f64(a)
v_cvt_i32_f64 i32 f64 i32_of64(a)
v_cvt_pkrtz_f16_f32 u32 f32,f32 f16_toward_zero(a) | (f16_toward_zero(b) << u32(16))
v_pack_b32_f16 u32 u16,u16 a | (b << u32(16))
v_add_f16 f16 f16,f16 a + b
v_sub_f16 f16 f16,f16 a - b
v_mul_f16 f16 f16,f16 a * b
v_max_f16 f16 f16,f16 max32(a, b)
v_min_f16 f16 f16,f16 min32(a, b)
v_add_f64 f64 f64,f64 a + b
v_mul_f64 f64 f64,f64 a * b
v_fma_f64 f64 f64,f64,f64 fma64(a, b, c)
v_fmac_f64 f64 f64,f64,f64 fma64(a, b, c)
v_max_f64 f64 f64,f64 max64(a, b)
v_min_f64 f64 f64,f64 min64(a, b)
v_rcp_f64 f64 f64 f64(1) / a
v_ldexp_f64 f64 f64,i32 ldexp64(a, b)
v_rndne_f64 f64 f64 rint_of(a)
v_frexp_mant_f64 f64 f64 frexp_mant(a)
v_frexp_exp_i32_f64 i32 f64 frexp_exp(a)
v_fma_mixlo_f16 f16 f32,f32,f32 fma32(a, b, c)
v_fma_mixhi_f16 f16 f32,f32,f32 fma32(a, b, c)
v_fma_mix_f32 f32 f32,f32,f32 fma32(a, b, c)
v_pk_mov_b32 u32 u32 a
v_pk_add_f32 f32 f32,f32 a + b
v_pk_mul_f32 f32 f32,f32 a * b
v_pk_fma_f32 f32 f32,f32,f32 fma32(a, b, c)
v_pk_add_f16 f16 f16,f16 a + b
v_pk_mul_f16 f16 f16,f16 a * b
v_pk_max_f16 f16 f16,f16 max32(a, b)
v_pk_min_f16 f16 f16,f16 min32(a, b)
v_pk_mul_lo_u16 u16 u16,u16 a * b
v_pk_add_u16 u16 u16,u16 a + b
v_pk_lshlrev_b16 u16 u16,u16 b << (a & u32(15))
"""

# Comparisons; the "n" forms are true for NaN operands.
_COMPARISONS = {
    "lt": "a < b", "eq": "a == b", "le": "a <= b", "gt": "a > b", "lg": "(a < b) | (a > b)", "ge": "a >= b",
    "o": "(a == a) & (b == b)", "u": "(a != a) | (b != b)", "nge": "no(a >= b)", "nlg": "no((a < b) | (a > b))",
    "ngt": "no(a > b)", "nle": "no(a <= b)", "neq": "no(a == b)", "nlt": "no(a < b)", "ne": "a != b",
}  # fmt: skip

# Scalar instructions: name, result, operands, expression [; scc]. "scc" is an operand; d is the result. Sums wrap.
_SCALAR = """
s_mov_b32 u32 u32 a
s_mov_b64 u64 u64 a
s_movk_i32 i32 i32 a
s_cmov_b32 u32 u32,old,scc sel(m, a, b)
s_not_b32 u32 u32 ~a ; d != u32(0)
s_not_b64 u64 u64 ~a ; d != u64(0)
s_abs_i32 i32 i32 sel(a < 0, i32(u32(0) - u32(a)), a) ; d != i32(0)
s_brev_b32 u32 u32 bfrev(a)
s_sext_i32_i8 i32 i32 (a << 24) >> 24
s_sext_i32_i16 i32 i32 (a << 16) >> 16
s_ff1_i32_b32 u32 u32 sel(a == u32(0), u32(4294967295), trailing_zeros(a))
s_flbit_i32_b32 u32 u32 sel(a == u32(0), u32(4294967295), leading_zeros(a))
s_bcnt1_i32_b32 u32 u32 popcount(a) ; d != u32(0)
s_add_i32 u32 u32,u32 a + b ; ((~(a ^ b)) & (a ^ d)) >> u32(31)
s_sub_i32 u32 u32,u32 a - b ; ((a ^ b) & (a ^ d)) >> u32(31)
s_addk_i32 u32 old,i32 a + u32(b) ; ((~(a ^ u32(b))) & (a ^ d)) >> u32(31)
s_mulk_i32 u32 old,i32 a * u32(b)
s_add_u32 u32 u32,u32 a + b ; d < a
s_sub_u32 u32 u32,u32 a - b ; a < b
s_addc_u32 u32 u32,u32,scc a + b + u32(m) ; u64(a) + u64(b) + u64(m) > u64(4294967295)
s_subb_u32 u32 u32,u32,scc a - b - u32(m) ; u64(b) + u64(m) > u64(a)
s_mul_i32 u32 u32,u32 a * b
s_mul_hi_u32 u32 u32,u32 u32((u64(a) * u64(b)) >> u64(32))
s_mul_hi_i32 i32 i32,i32 i32((i64(a) * i64(b)) >> i64(32))
s_lshl1_add_u32 u32 u32,u32 (a << u32(1)) + b ; (u64(a) << u64(1)) + u64(b) > u64(4294967295)
s_lshl2_add_u32 u32 u32,u32 (a << u32(2)) + b ; (u64(a) << u64(2)) + u64(b) > u64(4294967295)
s_lshl3_add_u32 u32 u32,u32 (a << u32(3)) + b ; (u64(a) << u64(3)) + u64(b) > u64(4294967295)
s_lshl4_add_u32 u32 u32,u32 (a << u32(4)) + b ; (u64(a) << u64(4)) + u64(b) > u64(4294967295)
s_and_b32 u32 u32,u32 a & b ; d != u32(0)
s_or_b32 u32 u32,u32 a | b ; d != u32(0)
s_xor_b32 u32 u32,u32 a ^ b ; d != u32(0)
s_andn2_b32 u32 u32,u32 a & ~b ; d != u32(0)
s_orn2_b32 u32 u32,u32 a | ~b ; d != u32(0)
s_and_b64 u64 u64,u64 a & b ; d != u64(0)
s_or_b64 u64 u64,u64 a | b ; d != u64(0)
s_xor_b64 u64 u64,u64 a ^ b ; d != u64(0)
s_andn2_b64 u64 u64,u64 a & ~b ; d != u64(0)
s_orn2_b64 u64 u64,u64 a | ~b ; d != u64(0)
s_nor_b64 u64 u64,u64 ~(a | b) ; d != u64(0)
s_xnor_b64 u64 u64,u64 ~(a ^ b) ; d != u64(0)
s_lshl_b32 u32 u32,u32 a << (b & u32(31)) ; d != u32(0)
s_lshr_b32 u32 u32,u32 a >> (b & u32(31)) ; d != u32(0)
s_ashr_i32 i32 i32,u32 a >> i32(b & u32(31)) ; d != i32(0)
s_lshl_b64 u64 u64,u32 a << u64(b & u32(63)) ; d != u64(0)
s_lshr_b64 u64 u64,u32 a >> u64(b & u32(63)) ; d != u64(0)
s_ashr_i64 i64 i64,u32 a >> i64(b & u32(63)) ; d != i64(0)
s_bfe_u32 u32 u32,u32 bfe_u32(a, b & u32(31), (b >> u32(16)) & u32(127)) ; d != u32(0)
s_bfe_i32 i32 i32,u32 bfe_i32(a, b & u32(31), (b >> u32(16)) & u32(127)) ; d != i32(0)
s_bfm_b32 u32 u32,u32 ((u32(1) << (a & u32(31))) - u32(1)) << (b & u32(31))
s_pack_ll_b32_b16 u32 u32,u32 (a & u32(65535)) | (b << u32(16))
s_max_i32 i32 i32,i32 sel(a > b, a, b) ; a > b
s_min_i32 i32 i32,i32 sel(a < b, a, b) ; a < b
s_max_u32 u32 u32,u32 sel(a > b, a, b) ; a > b
s_min_u32 u32 u32,u32 sel(a < b, a, b) ; a < b
s_cselect_b32 u32 u32,u32,scc sel(m, a, b)
s_cselect_b64 u64 u64,u64,scc sel(m, a, b)
s_bitcmp0_b32 none u32,u32 a ; ((a >> (b & u32(31))) & u32(1)) == u32(0)
s_bitcmp1_b32 none u32,u32 a ; ((a >> (b & u32(31))) & u32(1)) == u32(1)
"""

_ORDER = {"eq": "==", "lg": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}

# d ← exec, then exec ← f(operand, exec); scc = exec is not 0. `b` is the old exec.
_SAVE_EXEC = {
    "s_and_saveexec_b64": "a & b",
    "s_or_saveexec_b64": "a | b",
    "s_xor_saveexec_b64": "a ^ b",
    "s_andn2_saveexec_b64": "a & ~b",
    "s_andn1_saveexec_b64": "~a & b",
}


def _table(text: str) -> dict[str, Rule]:
    found = {}
    for line in text.strip().splitlines():
        name, result, operands, expression = line.split(" ", 3)
        value, _, flag = expression.partition(" ; ")
        sources = tuple(operands.split(","))
        masked = sources[-1] in ("mask", "scc")
        found[name] = Rule(name, result, sources[:-1] if masked else sources, value, flag, masked)
    return found


def _comparisons() -> dict[str, Rule]:
    found = {}
    for kind in ("f16", "f32", "f64", "u16", "i16", "u32", "i32", "u64", "i64"):
        for name, value in _COMPARISONS.items():
            if (kind[0] == "f") == (name != "ne") or name in ("lt", "eq", "le", "gt", "ge"):
                found[f"v_cmp_{name}_{kind}"] = Rule(f"v_cmp_{name}_{kind}", "mask", (kind, kind), value)
    return found


def _scalar_comparisons() -> dict[str, Rule]:
    return {
        name: Rule(name, "none", (kind, kind), "a", f"a {sign} b")
        for order, sign in _ORDER.items()
        for kind in ("i32", "u32", "u64")
        if kind != "u64" or order in ("eq", "lg")
        for name in (f"s_cmp_{order}_{kind}",)
    }


VECTOR = _table(_VECTOR) | _comparisons()
SCALAR = _table(_SCALAR) | _scalar_comparisons()
SCALAR |= {name: Rule(name, "u64", ("u64", "u64"), value, "d != u64(0)") for name, value in _SAVE_EXEC.items()}
SAVE_EXEC = frozenset(_SAVE_EXEC)
RULES = (*VECTOR.values(), *SCALAR.values())
NUMBER = {rule.name: index for index, rule in enumerate(RULES)}
