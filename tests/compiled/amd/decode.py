"""Statements as numbered instructions with numbered registers, in an array that both engines execute.

Every operand and every modifier is consumed by the handler of its instruction; what is left over is an error.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from .rules import NUMBER, SAVE_EXEC, SCALAR, VECTOR, Rule
from .text import KernelText, ProgramError, Statement

OPERAND = np.dtype([("kind", "i4"), ("index", "i4"), ("words", "i4"), ("flags", "i4"), ("value", "u8")])
INSTRUCTION = np.dtype(
    [
        ("handler", "i4"), ("rule", "i4"), ("sources", "i4"), ("line", "i4"), ("m", "i4", (12,)),
        ("result", OPERAND), ("second", OPERAND), ("source", OPERAND, (4,)),
    ]
)  # fmt: skip

VCC, M0, EXEC = 106, 124, 126
ACCUMULATION = 256  # a0 follows v255


class Kind(IntEnum):
    """Where an operand is."""

    NONE = 0
    VECTOR = 1
    SCALAR = 2
    CONSTANT = 3
    CONDITION = 4  # scc


class Handler(IntEnum):
    """How an instruction is executed; the meaning of `m` depends on it."""

    VECTOR = 0
    COMPARE = 1
    SCALAR = 2
    SAVE_EXEC = 3
    PACKED = 4
    READ_LANE = 5
    WRITE_LANE = 6
    BRANCH = 7
    BARRIER = 8
    WAIT = 9
    IDLE = 10
    END = 11
    SCALAR_LOAD = 12
    LOAD = 13
    STORE = 14
    LOCAL_READ = 15
    LOCAL_WRITE = 16
    PERMUTE = 17
    SWIZZLE = 18
    MATRIX = 19


class Select(IntEnum):
    """Parts of a register."""

    DWORD = 0
    WORD_0 = 1
    WORD_1 = 2
    BYTE_0 = 3
    BYTE_1 = 4
    BYTE_2 = 5
    BYTE_3 = 6


class Flag(IntEnum):
    """Bits of an operand's flags."""

    NEGATE = 1
    ABSOLUTE = 2
    EXTEND = 4
    HALF = 8  # an fp16 number that is converted to fp32
    SELECT = 16  # times a `Select`
    SIGN = 128  # times the number of the sign bit, 15, 31 or 63
    HIGH = 1 << 16  # of a packed operand: the low result uses the high half
    HIGH_FOR_HIGH = 1 << 17
    NEGATE_LOW = 1 << 18
    NEGATE_HIGH = 1 << 19


class Row(IntEnum):
    """Lane permutations of DPP (`m[1]`)."""

    NONE = 0
    QUAD = 1
    SHIFT_LEFT = 2
    SHIFT_RIGHT = 3
    ROTATE = 4
    BROADCAST = 5
    MIRROR = 6
    HALF_MIRROR = 7


class Condition(IntEnum):
    """Branch conditions (`m[0]`)."""

    ALWAYS = 0
    SCC0 = 1
    SCC1 = 2
    VCCZ = 3
    VCCNZ = 4
    EXECZ = 5
    EXECNZ = 6


class Program(NamedTuple):
    """A decoded kernel."""

    text: KernelText
    code: np.ndarray  # INSTRUCTION


def decode(text: KernelText) -> Program:
    """Number the registers of all statements."""
    code = np.zeros(len(text.statements), INSTRUCTION)
    for index, statement in enumerate(text.statements):
        try:
            code[index] = _record(statement._replace(line=0)) if statement.operands else _decoded(statement, {})
        except ProgramError:  # a branch, or an error that shall name the line
            code[index] = _decoded(statement, text.labels)
        code[index]["line"] = statement.line
    return Program(text, code)


def _decoded(statement: Statement, labels: dict[str, int]) -> np.void:
    found = np.zeros((), INSTRUCTION)
    _Decoder(statement, labels, found).run()
    return found[()]


@functools.lru_cache(maxsize=1 << 16)
def _record(statement: Statement) -> np.void:
    """Variants of a kernel share most of their instructions."""
    return _decoded(statement, {})


WORDS = {"u64": 2, "i64": 2, "f64": 2}
_FLOATS = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}
_MATRIX = re.compile(r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?(f32|f16|bf16|xf32)(?:_1k)?$")
MATRICES = {
    (32, 32, 8, "f16"), (32, 32, 8, "bf16"), (16, 16, 16, "f16"), (16, 16, 16, "bf16"), (32, 32, 2, "f32"),
    (16, 16, 4, "f32"), (32, 32, 4, "xf32"), (16, 16, 8, "xf32"),
}  # fmt: skip
ELEMENTS = ("f32", "f16", "bf16", "xf32")  # `m[3]` of a matrix instruction
_LOADS = {"ubyte": (1, 0), "sbyte": (1, 1), "ushort": (2, 0), "sshort": (2, 1), "dword": (4, 0), "dwordx2": (8, 0),
          "dwordx3": (12, 0), "dwordx4": (16, 0)}  # fmt: skip
_STORES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_LOCAL = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}
_CACHE_HINTS = ("sc0", "sc1", "nt")  # no effect on what one launch computes


class _Decoder:
    def __init__(self, statement: Statement, labels: dict[str, int], out: Any) -> None:
        self.statement = statement
        self.labels = labels
        self.out = out
        self.modifiers = list(statement.modifiers)

    def run(self) -> None:
        opcode = self.statement.opcode
        self.out["line"] = self.statement.line
        for pattern, method in _METHODS:
            if re.match(pattern, opcode):
                method(self, opcode)
                break
        else:
            raise self.statement.error("unknown instruction")
        if self.modifiers:
            raise self.statement.error(f"unknown modifiers {self.modifiers}")

    def take(self, count: int) -> list[str]:
        if len(self.statement.operands) != count:
            raise self.statement.error(f"{count} operands expected")
        return list(self.statement.operands)

    def flag(self, name: str) -> bool:
        found = name in self.modifiers
        if found:
            self.modifiers.remove(name)
        return found

    def value(self, name: str) -> str | None:
        """Take the modifier `name:value`."""
        for modifier in self.modifiers:
            if modifier.startswith(f"{name}:"):
                self.modifiers.remove(modifier)
                return modifier[len(name) + 1 :]
        return None

    def number(self, name: str, default: int = 0) -> int:
        value = self.value(name)
        return default if value is None else int(value, 0)

    def bits(self, name: str, count: int, default: int) -> list[int]:
        value = self.value(name)
        found = [default] * count if value is None else [int(bit) for bit in value.strip("[]").split(",")]
        if len(found) != count or not set(found) <= {0, 1}:
            raise self.statement.error(f"{name} takes {count} bits")
        return found

    # Operands

    def register(self, written: str, words: int, *, result: bool = False) -> tuple[int, int] | None:
        """Kind and index of a register operand."""
        named = {"vcc": VCC, "exec": EXEC}
        if written in named and words == 2:
            return Kind.SCALAR, named[written]
        single = {"vcc_lo": VCC, "vcc_hi": VCC + 1, "exec_lo": EXEC, "exec_hi": EXEC + 1, "m0": M0}
        if written in single and words == 1:
            return Kind.SCALAR, single[written]
        found = re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])", written)
        if found is None:
            return None
        first = int(found[2] or found[3])
        if (int(found[4]) - first + 1 if found[4] else 1) != words:
            raise self.statement.error(f"{written} is not {words} registers")
        if first + words > (102 if found[1] == "s" else 256):
            raise self.statement.error(f"no register {written}")
        if found[1] == "s":
            return Kind.SCALAR, first
        return Kind.VECTOR, first + (ACCUMULATION if found[1] == "a" else 0)

    def place(self, where: Any, written: str, words: int, kind: Kind) -> None:
        """A register that is written, or read without modifiers."""
        found = self.register(written, words)
        if found is None or found[0] != kind:
            raise self.statement.error(f"{written} is not a {kind.name.lower()} register")
        where["kind"], where["index"], where["words"] = found[0], found[1], words

    def operand(self, where: Any, written: str, type_: str) -> None:
        """A source: a register or a constant, with negation, absolute value and sign extension."""
        flags = Flag.SIGN * {"f64": 63, "f16": 15, "u16": 15, "i16": 15}.get(type_, 31)
        if written.startswith("sext("):
            written, flags = written[5:-1], flags | Flag.EXTEND
        if re.match(r"-(?![\d.])", written):
            written, flags = written[1:], flags | Flag.NEGATE
        if re.fullmatch(r"\|.*\|", written):
            written, flags = written[1:-1], flags | Flag.ABSOLUTE
        words = WORDS.get(type_, 1)
        found = self.register(written, words)
        where["flags"], where["words"] = flags, words
        if found is not None:
            where["kind"], where["index"] = found
        else:
            where["kind"], where["value"] = Kind.CONSTANT, self.constant(written, type_)

    def constant(self, written: str, type_: str) -> int:
        """Bits of an inline constant or literal."""
        try:
            number = int(written, 0)
        except ValueError:
            try:
                real = float(written)
            except ValueError:
                raise self.statement.error(f"unknown operand {written!r}") from None
            float_type = type_ if type_ in _FLOATS else {2: "f64"}.get(WORDS.get(type_, 1), "f32")
            if type_ in ("u16", "i16"):
                float_type = "f16"
            packed, bits = _FLOATS[float_type]
            return int(struct.unpack(bits, struct.pack(packed, real))[0])
        if type_ == "f64" and not -16 <= number <= 64:
            return (number & 0xFFFFFFFF) << 32  # a literal holds the high half
        return number & (0xFFFFFFFFFFFFFFFF if WORDS.get(type_) == 2 else 0xFFFFFFFF)

    # Arithmetic

    def vector(self, opcode: str) -> None:
        base, encoding = re.fullmatch(r"(\w+?)(?:_(e32|e64|dpp|sdwa))?", opcode).groups()  # type: ignore[union-attr]
        rule = VECTOR.get(base)
        if rule is None:
            raise self.statement.error("unknown instruction")
        if rule.flag == "" and not rule.result.startswith("f") and "clamp" in self.modifiers:
            rule = VECTOR.get(f"{base}:clamp")
            if rule is None or not self.flag("clamp"):
                raise self.statement.error("clamp is not known here")
        out, given = self.out, list(self.statement.operands)
        out["handler"], out["rule"] = Handler.COMPARE if rule.result == "mask" else Handler.VECTOR, NUMBER[rule.name]
        sources = self._vector_results(rule, given)
        if base.startswith("v_pk_"):
            self.packed(rule)
            return
        for index, (written, type_) in enumerate(zip(sources, rule.sources, strict=True)):
            self.operand(out["source"][index], written, type_)
        out["sources"] = len(rule.sources)
        if encoding == "dpp":
            self.lanes()
        elif encoding == "sdwa":
            self.parts(len(sources), compare=rule.result == "mask")
        if base.startswith("v_fma_mix"):
            self.mixed(base)
        elif "f16" in base or "16" in rule.result or base == "v_pack_b32_f16":
            self.halves(rule)
        if rule.result == "f32" and self.flag("clamp"):
            out["m"][8] = 1
        omod = self.value("mul") or self.value("div")
        if omod:
            raise self.statement.error("output modifiers are not known")

    def _vector_results(self, rule: Rule, given: list[str]) -> list[str]:
        """Decode results, carries and masks; return the written sources."""
        out = self.out
        if rule.result == "mask":
            self.place(out["result"], given.pop(0), 2, Kind.SCALAR)
        else:
            if not given:
                raise self.statement.error("no operands")
            words = (
                2 if rule.name.startswith("v_pk_") and rule.name.endswith(("f32", "b32")) else WORDS.get(rule.result, 1)
            )
            self.place(out["result"], given.pop(0), words, Kind.VECTOR)
        if rule.flag:
            if not given:
                raise self.statement.error("no carry")
            self.place(out["second"], given.pop(0), 2, Kind.SCALAR)
        if rule.mask:
            written = "vcc" if rule.name == "v_div_fmas_f32" else given.pop() if given else ""
            self.place(out["source"][3], written, 2, Kind.SCALAR)
        if rule.name.startswith("v_fmac_"):
            given.append(self.statement.operands[0])
        if rule.name.startswith("v_pk_mov"):
            return given
        if len(given) != len(rule.sources):
            raise self.statement.error(f"{len(rule.sources)} sources expected")
        return given

    def lanes(self) -> None:
        """DPP: m[0] = 1, m[1] permutation, m[2] its argument, m[3] row mask, m[4] bank mask, m[5] zeros for invalid."""
        m = self.out["m"]
        m[0] = 1
        quad = self.value("quad_perm")
        if quad is not None:
            m[1], m[2] = Row.QUAD, sum(int(lane) << 2 * i for i, lane in enumerate(quad.strip("[]").split(",")))
        for name, row in (("row_shl", 2), ("row_shr", 3), ("row_ror", 4), ("row_bcast", 5)):
            value = self.value(name)
            if value is not None:
                m[1], m[2] = row, int(value)
        for name, row in (("row_mirror", 6), ("row_half_mirror", 7)):
            if self.flag(name):
                m[1] = row
        m[3], m[4] = self.number("row_mask", 15), self.number("bank_mask", 15)
        zeros = self.value("bound_ctrl")
        m[5] = zeros is not None
        allowed = (15, 31) if m[1] == Row.BROADCAST else range(1, 16) if m[1] in (2, 3, 4) else range(256)
        if m[1] == Row.NONE or zeros not in (None, "1") or m[2] not in allowed:
            raise self.statement.error("unknown lane permutation")

    def parts(self, sources: int, *, compare: bool) -> None:
        """SDWA: parts of the sources, and m[6] part of the result, m[7] = 1 to preserve its other bits."""
        out = self.out
        for index in range(sources):
            selected = self.value(f"src{index}_sel")
            if selected not in Select.__members__:
                raise self.statement.error(f"src{index}_sel is {selected}")
            out["source"][index]["flags"] |= Flag.SELECT * Select[selected]
        if compare:
            return
        selected, unused = self.value("dst_sel"), self.value("dst_unused")
        if selected not in Select.__members__ or unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
            raise self.statement.error(f"dst_sel is {selected}, dst_unused {unused}")
        out["m"][6], out["m"][7] = Select[selected], unused == "UNUSED_PRESERVE"

    def mixed(self, base: str) -> None:
        """Sources are fp32, or with `op_sel_hi` a half of a register; the result is fp32 or replaces a half."""
        out = self.out
        low, halves = self.bits("op_sel", 3, 0), self.bits("op_sel_hi", 3, 0)
        for source, high, half in zip(out["source"], low, halves, strict=False):
            if (half and source["kind"] == Kind.CONSTANT) or high > half:
                raise self.statement.error("unknown halves")
            if half:
                source["flags"] |= Flag.HALF | Flag.SELECT * (Select.WORD_1 if high else Select.WORD_0)
        if base != "v_fma_mix_f32":
            out["m"][6], out["m"][7] = Select.WORD_0 if base == "v_fma_mixlo_f16" else Select.WORD_1, 1

    def halves(self, rule: Rule) -> None:
        """`op_sel` of a 16-bit instruction: a bit per source, and one for the result."""
        written = self.value("op_sel")
        if written is None:
            return
        bits = [int(bit) for bit in written.strip("[]").split(",")]
        if len(bits) not in (len(rule.sources), len(rule.sources) + 1):
            raise self.statement.error("op_sel has the wrong length")
        for index, (bit, type_) in enumerate(zip(bits, rule.sources, strict=False)):
            if bit and "16" not in type_:
                raise self.statement.error("op_sel selects a half of 32 bits")
            if bit:
                self.out["source"][index]["flags"] |= Flag.SELECT * Select.WORD_1
        if len(bits) > len(rule.sources) and bits[-1]:
            self.out["m"][6], self.out["m"][7] = Select.WORD_1, 1

    def packed(self, rule: Rule) -> None:
        """Two results; per source, which half each uses, and two signs. m[0] is the width of a half in bits."""
        out, moves = self.out, rule.name == "v_pk_mov_b32"
        given = self.statement.operands[1:]
        wide = rule.name.endswith(("f32", "b32"))
        out["handler"], out["m"][0] = Handler.PACKED, 32 if wide else 16
        low, high = self.bits("op_sel", len(given), 0), self.bits("op_sel_hi", len(given), 1)
        signs = self.bits("neg_lo", len(given), 0), self.bits("neg_hi", len(given), 0)
        if moves:
            # The low result is a half of the first source, the high result a half of the second.
            if len(given) != 2 or high != [1, 1]:
                raise self.statement.error("unknown form of v_pk_mov_b32")
            out["m"][1] = 1
        for index, written in enumerate(given):
            source = out["source"][index]
            self.operand(source, written, "u64" if wide and self.register_like(written) else rule.sources[0])
            if source["kind"] == Kind.CONSTANT and (not wide or low[index] or high[index]):
                raise self.statement.error("halves of a constant")
            source["flags"] |= (
                Flag.HIGH * low[index] | Flag.HIGH_FOR_HIGH * high[index]
                | Flag.NEGATE_LOW * signs[0][index] | Flag.NEGATE_HIGH * signs[1][index]
            )  # fmt: skip
        out["sources"] = len(given)

    def register_like(self, written: str) -> bool:
        return re.match(r"[vsa]\[|vcc$", written) is not None

    def scalar(self, opcode: str) -> None:
        rule = SCALAR.get(opcode)
        if rule is None:
            raise self.statement.error("unknown instruction")
        out, given = self.out, list(self.statement.operands)
        out["handler"], out["rule"] = Handler.SAVE_EXEC if opcode in SAVE_EXEC else Handler.SCALAR, NUMBER[opcode]
        types = rule.sources
        if opcode in SAVE_EXEC:
            given.append("exec")
        if rule.result != "none":
            if not given:
                raise self.statement.error("no operands")
            if "old" in types:
                given.insert(1 + types.index("old"), given[0])
            self.place(out["result"], given.pop(0), WORDS.get(rule.result, 1), Kind.SCALAR)
        if len(given) != len(types):
            raise self.statement.error(f"{len(types)} sources expected")
        for index, (written, type_) in enumerate(zip(given, types, strict=True)):
            self.operand(out["source"][index], written, "u32" if type_ == "old" else type_)
            if opcode in ("s_movk_i32", "s_addk_i32", "s_mulk_i32", "s_cmovk_i32") and type_ == "i32":
                value = int(written, 0) & 0xFFFF
                out["source"][index]["value"] = (value ^ 0x8000) - 0x8000 & 0xFFFFFFFF
        out["sources"] = len(types)

    def read_lane(self, opcode: str) -> None:
        first = opcode == "v_readfirstlane_b32"
        given = self.take(2 if first else 3)
        self.out["handler"], self.out["m"][0] = Handler.READ_LANE, first
        self.place(self.out["result"], given[0], 1, Kind.SCALAR)
        self.place(self.out["source"][0], given[1], 1, Kind.VECTOR)
        if not first:
            self.operand(self.out["source"][1], given[2], "u32")
        self.out["sources"] = len(given) - 1

    def write_lane(self, opcode: str) -> None:
        given = self.take(3)
        self.out["handler"], self.out["sources"] = Handler.WRITE_LANE, 2
        self.place(self.out["result"], given[0], 1, Kind.VECTOR)
        for index in (0, 1):
            self.operand(self.out["source"][index], given[index + 1], "u32")

    # Control

    def branch(self, opcode: str) -> None:
        (label,) = self.take(1)
        if label not in self.labels:
            raise self.statement.error("unknown label")
        condition = "ALWAYS" if opcode == "s_branch" else opcode.removeprefix("s_cbranch_").upper()
        if condition not in Condition.__members__:
            raise self.statement.error("unknown instruction")
        self.out["handler"], self.out["m"][:2] = Handler.BRANCH, (Condition[condition], self.labels[label])

    def wait(self, opcode: str) -> None:
        counts = {"vmcnt": 63, "lgkmcnt": 15}
        for modifier in self.statement.modifiers:
            found = re.fullmatch(r"(vmcnt|lgkmcnt)\((\d+)\)", modifier)
            if found is None:
                raise self.statement.error(f"unknown counter {modifier}")
            counts[found[1]] = int(found[2])
        self.modifiers.clear()
        self.out["handler"], self.out["m"][:2] = Handler.WAIT, (counts["vmcnt"], counts["lgkmcnt"])

    def idle(self, opcode: str) -> None:
        self.take(1)
        self.out["handler"] = Handler.IDLE

    def barrier(self, opcode: str) -> None:
        self.take(0)
        self.out["handler"] = Handler.BARRIER

    def end(self, opcode: str) -> None:
        self.take(0)
        self.out["handler"] = Handler.END

    # Memory

    def scalar_load(self, opcode: str) -> None:
        given = self.take(3)
        words = int(opcode.removeprefix("s_load_dword").removeprefix("x") or 1)
        if words not in (1, 2, 4, 8, 16):
            raise self.statement.error("unknown instruction")
        self.out["handler"], self.out["sources"], self.out["m"][0] = Handler.SCALAR_LOAD, 2, words
        self.place(self.out["result"], given[0], words, Kind.SCALAR)
        self.place(self.out["source"][0], given[1], 2, Kind.SCALAR)
        self.operand(self.out["source"][1], given[2], "u32")

    def vector_memory(self, opcode: str) -> None:
        """m: bytes, sign extension, offset, 1 for a buffer (2 with a lane offset), part of the result for d16."""
        space, kind, size = opcode.split("_")[:3]
        out, given = self.out, list(self.statement.operands)
        sizes: dict[str, Any] = _LOADS if kind == "load" else _STORES
        high = opcode.endswith("_d16_hi")
        if opcode not in (f"{space}_{kind}_{size}", f"{space}_{kind}_{size}_d16_hi") or size not in sizes:
            raise self.statement.error("unknown instruction")
        if high and kind == "load":
            raise self.statement.error("unknown instruction")
        count, signed = sizes[size] if kind == "load" else (sizes[size], 0)
        out["handler"], words = Handler.LOAD if kind == "load" else Handler.STORE, max(1, count // 4)
        out["m"][:3] = count, signed, self.number("offset")
        out["m"][4] = high
        if space == "buffer":
            self.take(4)
            out["m"][3] = 2 if self.flag("offen") else 1
            data, address, resource, offset = given
            self.place(out["source"][1], resource, 4, Kind.SCALAR)
            self.operand(out["source"][2], offset, "u32")
        else:
            self.take(3)
            data, address, base = given if kind == "load" else (given[1], given[0], given[2])
            if base != "off":
                self.place(out["source"][1], base, 2, Kind.SCALAR)
        if not (space == "buffer" and out["m"][3] == 1 and address == "off"):
            self.place(out["source"][0], address, 2 if space == "global" and base == "off" else 1, Kind.VECTOR)
        self.place(out["result"] if kind == "load" else out["source"][3], data, words, Kind.VECTOR)
        out["sources"] = 4
        for hint in _CACHE_HINTS:
            self.flag(hint)

    def private(self, opcode: str) -> None:
        """Spilled registers: m as for other vector memory, with 3 for the space."""
        _, kind, size = opcode.split("_", 2)
        sizes = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        if size not in sizes:
            raise self.statement.error("unknown instruction")
        given, out, loads = self.take(3), self.out, kind == "load"
        data, address, base = given if loads else (given[1], given[0], given[2])
        if address != "off":
            raise self.statement.error("unknown address")
        if base != "off":
            self.place(out["source"][1], base, 1, Kind.SCALAR)
        out["handler"] = Handler.LOAD if loads else Handler.STORE
        out["m"][:4] = sizes[size], 0, self.number("offset"), 3
        self.place(out["result"] if loads else out["source"][3], data, sizes[size] // 4, Kind.VECTOR)
        out["sources"] = 4

    def local(self, opcode: str) -> None:
        """m: bytes, count, first and second offset in bytes, sign extension, 1 for the high half."""
        found = re.fullmatch(r"ds_(read|write)(2?)(st64)?_([bui]\d+)(_d16_hi)?", opcode)
        if found is None or found[4] not in _LOCAL or (found[3] and not found[2]):
            raise self.statement.error("unknown instruction")
        kind, two, strided, size, high = found.groups()
        reads, count = kind == "read", 2 if two else 1
        if high and (reads or _LOCAL[size] > 2):
            raise self.statement.error("unknown instruction")
        out, given = self.out, self.take(2 if reads else 1 + count)
        out["handler"] = Handler.LOCAL_READ if reads else Handler.LOCAL_WRITE
        unit = _LOCAL[size] * (64 if strided else 1)
        offsets = [self.number(f"offset{i}") * unit for i in (0, 1)] if two else [self.number("offset"), 0]
        out["m"][:6] = _LOCAL[size], count, *offsets, size[0] == "i", high is not None
        words = max(1, _LOCAL[size] // 4)
        if reads:
            self.place(out["result"], given[0], words * count, Kind.VECTOR)
            self.place(out["source"][0], given[1], 1, Kind.VECTOR)
        else:
            self.place(out["source"][0], given[0], 1, Kind.VECTOR)
            for index in range(count):
                self.place(out["source"][1 + index], given[1 + index], words, Kind.VECTOR)
        out["sources"] = 1 if reads else 1 + count

    def permute(self, opcode: str) -> None:
        given = self.take(3)
        self.out["handler"], self.out["sources"], self.out["m"][0] = Handler.PERMUTE, 2, self.number("offset")
        self.place(self.out["result"], given[0], 1, Kind.VECTOR)
        for index in (0, 1):
            self.place(self.out["source"][index], given[index + 1], 1, Kind.VECTOR)

    def swizzle(self, opcode: str) -> None:
        """m[0]: lanes are exchanged with those at this distance."""
        given, found = self.take(2), re.fullmatch(r"swizzle\(SWAP,(1|2|4|8|16)\)", self.value("offset") or "")
        if found is None:
            raise self.statement.error("unknown swizzle")
        self.out["handler"], self.out["sources"], self.out["m"][0] = Handler.SWIZZLE, 1, int(found[1])
        self.place(self.out["result"], given[0], 1, Kind.VECTOR)
        self.place(self.out["source"][0], given[1], 1, Kind.VECTOR)

    def matrix(self, opcode: str) -> None:
        """m: rows, columns, products per element, type of the elements."""
        found = _MATRIX.fullmatch(opcode)
        shape = (*map(int, found.groups()[:3]), found[4]) if found else None
        if shape not in MATRICES or shape is None:
            raise self.statement.error("unknown instruction")
        rows, columns, depth, element = shape
        given, out = self.take(4), self.out
        per_lane = depth * rows // 64
        words = per_lane // 2 if element in ("f16", "bf16") else per_lane
        results = rows * columns // 64  # type: ignore[operator]
        out["handler"], out["m"][:4] = Handler.MATRIX, (rows, columns, depth, ELEMENTS.index(str(element)))
        self.place(out["result"], given[0], results, Kind.VECTOR)
        for index in (0, 1):
            self.place(out["source"][index], given[index + 1], words, Kind.VECTOR)
        if self.register(given[3], results) is not None:
            self.place(out["source"][2], given[3], results, Kind.VECTOR)
        else:
            out["source"][2]["kind"], out["source"][2]["value"] = Kind.CONSTANT, self.constant(given[3], "f32")
        out["sources"] = 3


_METHODS: Sequence[tuple[str, Callable[[_Decoder, str], None]]] = (
    (r"v_mfma_", _Decoder.matrix),
    (r"v_read(first)?lane_b32$", _Decoder.read_lane),
    (r"v_writelane_b32$", _Decoder.write_lane),
    (r"v_", _Decoder.vector),
    (r"s_(c?branch)", _Decoder.branch),
    (r"s_waitcnt$", _Decoder.wait),
    (r"s_nop$|s_setprio$", _Decoder.idle),
    (r"s_barrier$", _Decoder.barrier),
    (r"s_endpgm$", _Decoder.end),
    (r"s_load_dword", _Decoder.scalar_load),
    (r"s_", _Decoder.scalar),
    (r"(buffer|global)_(load|store)_", _Decoder.vector_memory),
    (r"scratch_(load|store)_", _Decoder.private),
    (r"ds_(read|write)", _Decoder.local),
    (r"ds_bpermute_b32$", _Decoder.permute),
    (r"ds_swizzle_b32$", _Decoder.swizzle),
)
