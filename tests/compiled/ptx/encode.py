"""Translation of parsed PTX into numbered instructions on numbered registers. What is not known is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled.launching import Argument
from compiled.ptx import asynchronous
from compiled.ptx.parameters import parameter_values
from compiled.ptx.parse import Address, Instruction, Literal, Operand, Pair, Program, PtxError, Register, Symbol, Vector
from compiled.ptx.rules import RULES, WIDTHS

OPERANDS = 16
ADDRESS = OPERANDS - 1  # place of the address register
LANES = 32

RULE_NUMBERS = {opcode: number for number, opcode in enumerate(RULES)}
SPECIAL = (
    "BRANCH", "RETURN", "BARRIER", "WARP_BARRIER", "LOAD_GLOBAL", "LOAD_SHARED", "STORE_GLOBAL", "STORE_SHARED",
    "LOAD_MATRICES", "MULTIPLY", "SHUFFLE", "REDUCE", "COPY", "COMMIT", "WAIT", *asynchronous.SPECIAL,
)  # fmt: skip
NUMBERS = {f"OP_{name}": len(RULES) + number for number, name in enumerate(SPECIAL)}

CODE = np.dtype(
    [
        ("op", np.int32), ("place", np.int32), ("predicate", np.int32), ("negated", np.int32),
        ("used", np.int32), ("rows", np.int32, OPERANDS), ("numbers", np.int32, 4), ("offset", np.int64),
    ],
    align=True,
)  # fmt: skip

_MEMORY = re.compile(r"(ld|st)\.(global|shared)(?:\.v([24]))?\.([bus])(8|16|32|64)$")
_MATRICES = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16$")
_PRODUCTS = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": 0,
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": 1,
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": 2,
}
_SHUFFLES = {f"shfl.sync.{mode}.b32": number for number, mode in enumerate(("up", "down", "bfly", "idx"))}
_REDUCTIONS = {f"redux.sync.{name}.s32": number for number, name in enumerate(("add", "max", "min"))}
_PARAMETER_BITS = {"b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}


class Encoded(NamedTuple):
    """A program for the cores."""

    code: np.ndarray  # of CODE
    counted: np.ndarray  # whether an entry of the code is the first one of its instruction
    start: np.ndarray  # register file of a warp at its start, uint32 [units, 32]
    thread: int  # rows of the thread index and of the program index
    program: int
    lists: np.ndarray  # rows of results and factors of matrix products of a warpgroup
    asynchronous: bool  # whether there are such products, or bulk copies


class Encoder:
    def __init__(self, program: Program, arguments: Sequence[Argument], grid: int, poison: int) -> None:
        self.program = program
        self.units = 0
        self.rows: dict[object, int] = {}
        self.constants: list[tuple[int, int, int]] = []  # row, bits, value
        self.poison = poison
        self.thread = self.row("%tid.x", 32)
        self.ctaid = self.row("%ctaid.x", 32)
        self.constant(grid, 32, "%nctaid.x")
        self.constant(program.threads, 32, "%ntid.x")
        self.values, self.maps = parameter_values(program, arguments)
        self.code: list[tuple[object, ...]] = []
        self.lists: list[int] = []
        self.starts: list[int] = []  # first entry of each instruction
        self.line = 0

    def row(self, key: object, bits: int) -> int:
        """The row of a register or constant."""
        if key not in self.rows:
            if bits == 64 and self.units % 2:
                self.units += 1  # 64-bit rows are aligned
            self.rows[key] = self.units
            self.units += 2 if bits == 64 else 1
        return self.rows[key]

    def constant(self, value: int, bits: int, key: object = None) -> int:
        """The row of a constant."""
        key = ("constant", bits, value) if key is None else key
        if key not in self.rows:
            self.constants.append((self.row(key, bits), bits, value & ((1 << bits) - 1)))
        return self.rows[key]

    def error(self, told: str) -> PtxError:
        return PtxError(f"line {self.line}: {told}")

    def bits_of(self, name: str) -> int:
        if name in ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x"):
            return 32
        prefix = name.rstrip("0123456789")
        if prefix not in self.program.registers:
            raise self.error(f"unknown register {name}")
        return self.program.registers[prefix]

    def register(self, operand: Operand, *allowed: int) -> int:
        """The row of a register with one of these numbers of bits; a new row for `_`."""
        if not isinstance(operand, Register):
            raise self.error(f"a register is expected instead of {operand}")
        if operand.name == "_":
            return self.row(("sink", allowed[0]), allowed[0])
        bits = self.bits_of(operand.name)
        if bits not in allowed:
            raise self.error(f"{operand.name} has {bits} bits instead of {allowed}")
        return self.row(operand.name, bits)

    def source(self, operand: Operand, bits: int, floating: bool = False) -> int:
        """The row of a register, number or symbol."""
        if isinstance(operand, Literal):
            if operand.kind == "int" and not floating:
                low = 0 if bits == 1 else -(1 << (bits - 1))
                if bits == 1:
                    return self.constant(int(operand.value != 0), bits)
                if low <= operand.value < 1 << bits:
                    return self.constant(operand.value, bits)
            elif operand.kind == f"f{bits}":
                return self.constant(operand.value, bits)
            raise self.error(f"{operand} is no number of {bits} bits")
        if operand == Symbol("global_smem") and bits in (32, 64):
            return self.constant(0, bits)
        if isinstance(operand, Symbol) and operand.name in self.maps and bits == 64:
            return self.constant(self.maps[operand.name], bits)
        return self.register(operand, bits)

    def rule_source(self, instruction: Instruction, operand: Operand, kind: str) -> int:
        """The row of an operand of a rule. Conversions take the low bits of wider registers."""
        bits = WIDTHS[kind]
        wide = isinstance(operand, Register) and self.bits_of(operand.name) == 64
        if wide and bits == 32 and kind != "f32" and instruction.opcode.startswith("cvt."):
            low = self.row(("low", operand), 32)
            self.emit(RULE_NUMBERS["low.b64"], instruction, [low, self.register(operand, 64)])
            return low
        return self.source(operand, bits, kind in ("f32", "f64"))

    def emit(
        self, op: int | str, instruction: Instruction, rows: Sequence[int], numbers: Sequence[int] = (),
        offset: int = 0, address: int = 0,
    ) -> None:  # fmt: skip
        place = len(self.starts) - 1
        predicate = -1 if instruction.predicate is None else self.register(Register(instruction.predicate), 1)
        number = NUMBERS[op] if isinstance(op, str) else op
        padded = [*rows, *[0] * (ADDRESS - len(rows)), address]
        all_numbers = [*numbers, *[0] * (4 - len(numbers))]
        self.code.append((number, place, predicate, instruction.negated, len(rows), padded, all_numbers, offset))

    def expect(self, instruction: Instruction, count: int) -> tuple[Operand, ...]:
        if len(instruction.operands) != count:
            raise self.error(f"{instruction.opcode} with {len(instruction.operands)} operands instead of {count}")
        return instruction.operands

    def encode(self) -> Encoded:
        for instruction in self.program.instructions:
            self.line = instruction.line
            self.starts.append(len(self.code))
            try:
                self.instruction(instruction)
            except PtxError as error:
                raise PtxError(f"{error} in {instruction.text!r}") from None
        self.starts.append(len(self.code))
        code = np.array(self.code, CODE)
        branches = code["op"] == NUMBERS["OP_BRANCH"]
        code["numbers"][branches, 0] = np.array(self.starts)[code["numbers"][branches, 0]]
        counted = np.zeros(len(code), bool)
        counted[self.starts[:-1]] = True
        start = np.full((self.units + 1, LANES), self.poison, np.uint32)
        for key, row in self.rows.items():  # predicates and 16-bit registers are held in 32 bits
            if isinstance(key, str) and key.startswith("%") and "." not in key:
                bits = self.bits_of(key)
                start[row] &= np.uint32(1 if bits == 1 else 0xFFFF if bits == 16 else 0xFFFF_FFFF)
        for row, bits, value in self.constants:
            if bits == 64:
                start[row : row + 2].reshape(-1).view(np.uint64)[:] = value
            else:
                start[row] = value
        further = any(op >= NUMBERS[f"OP_{asynchronous.SPECIAL[2]}"] for op in code["op"].tolist())
        return Encoded(code, counted, start, self.thread, self.ctaid, np.array(self.lists, np.int32), further)

    def instruction(self, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode.startswith("mov.b") and any(isinstance(x, Vector) for x in operands):
            self.move_parts(instruction)
        elif opcode.startswith("setp.") and opcode.endswith(".bf16x2"):
            self.compare_halves(instruction)
        elif opcode in RULES:
            rule = RULES[opcode]
            result, *sources = self.expect(instruction, 1 + len(rule.operands))
            rows = [self.register(result, WIDTHS[rule.result])]
            for operand, kind in zip(sources, rule.operands, strict=True):
                rows.append(self.rule_source(instruction, operand, kind))
            moves = opcode.startswith("mov.") and isinstance(sources[0], Register)
            self.emit(RULE_NUMBERS[opcode], instruction, rows, [int(moves)])
        elif opcode.startswith("ld.param."):
            self.load_parameter(instruction)
        elif found := _MEMORY.match(opcode):
            self.memory(instruction, found)
        elif found := _MATRICES.match(opcode):
            vector, address = self.expect(instruction, 2)
            rows = self.vector(vector, int(found[1]), 32)
            base, offset = self.address(address, 32)
            self.emit("OP_LOAD_MATRICES", instruction, rows, [len(rows), bool(found[2])], offset, base)
        elif opcode in _PRODUCTS:
            operands = self.expect(instruction, 4)
            rows = [row for x, count in zip(operands, (4, 4, 2, 4), strict=True) for row in self.vector(x, count, 32)]
            self.emit("OP_MULTIPLY", instruction, rows, [_PRODUCTS[opcode]])
        elif opcode in _SHUFFLES:
            result, *sources = self.expect(instruction, 5)
            rows = [self.register(result, 32), *(self.source(x, 32) for x in sources)]
            self.emit("OP_SHUFFLE", instruction, rows, [_SHUFFLES[opcode]])
        elif opcode in _REDUCTIONS:
            result, *sources = self.expect(instruction, 3)
            rows = [self.register(result, 32), *(self.source(x, 32) for x in sources)]
            self.emit("OP_REDUCE", instruction, rows, [_REDUCTIONS[opcode]])
        else:
            self.control(instruction)

    def control(self, instruction: Instruction) -> None:
        """Branches, barriers and asynchronous copies."""
        opcode = instruction.opcode
        if opcode in ("bra", "bra.uni"):
            (label,) = self.expect(instruction, 1)
            if not isinstance(label, Symbol) or label.name not in self.program.labels:
                raise self.error(f"unknown label {label}")
            self.emit("OP_BRANCH", instruction, [], [self.program.labels[label.name]])
        elif opcode == "ret":
            self.expect(instruction, 0)
            self.emit("OP_RETURN", instruction, [])
        elif opcode == "bar.sync":
            if self.expect(instruction, 1) != (Literal(0, "int"),):
                raise self.error("another barrier than 0")
            self.emit("OP_BARRIER", instruction, [])
        elif opcode == "bar.warp.sync":
            self.emit("OP_WARP_BARRIER", instruction, [self.source(self.expect(instruction, 1)[0], 32)])
        elif opcode in ("cp.async.cg.shared.global", "cp.async.ca.shared.global"):
            self.copy(instruction)
        elif opcode == "cp.async.commit_group":
            self.expect(instruction, 0)
            self.emit("OP_COMMIT", instruction, [])
        elif opcode == "cp.async.wait_group":
            (count,) = self.expect(instruction, 1)
            if not isinstance(count, Literal):
                raise self.error("a number is expected")
            self.emit("OP_WAIT", instruction, [], [count.value])
        elif not asynchronous.encode_asynchronous(self, instruction):
            raise self.error(f"unknown instruction {opcode}")

    def copy(self, instruction: Instruction) -> None:
        operands = instruction.operands
        if len(operands) not in (3, 4) or not isinstance(operands[2], Literal):
            raise self.error("unknown operands")
        size = operands[2].value
        if size not in ((16,) if ".cg." in instruction.opcode else (4, 8, 16)):
            raise self.error(f"copies of {size} bytes")
        to, offset = self.address(operands[0], 32)
        source, source_offset = self.address(operands[1], 64)
        given = self.source(operands[3], 32) if len(operands) == 4 else 0
        numbers = [size, len(operands) == 4, source_offset]
        self.emit("OP_COPY", instruction, [to, source, given], numbers, offset)

    def move_parts(self, instruction: Instruction) -> None:
        """Pack two registers into one of twice the width, or unpack."""
        result, source = self.expect(instruction, 2)
        bits = int(instruction.opcode.removeprefix("mov.b"))
        if bits not in (32, 64):
            raise self.error(f"unknown instruction {instruction.opcode}")
        if isinstance(source, Vector):
            rows = [self.register(result, bits), *self.vector(source, 2, bits // 2)]
            self.emit(RULE_NUMBERS[f"pack.b{bits}"], instruction, rows)
            return
        parts = self.vector(result, 2, bits // 2)
        whole = self.register(source, bits)
        for name, row in zip(("low", "high"), parts, strict=True):
            self.emit(RULE_NUMBERS[f"{name}.b{bits}"], instruction, [row, whole])

    def compare_halves(self, instruction: Instruction) -> None:
        """Compare two numbers in each register."""
        results, *sources = self.expect(instruction, 3)
        opcode = instruction.opcode.removesuffix("x2")
        if opcode not in RULES or not isinstance(results, Pair):
            raise self.error(f"unknown instruction {instruction.opcode}")
        for name, result in zip(("low", "high"), results, strict=True):
            parts = [self.row((name, x), 32) for x in sources]
            for part, x in zip(parts, sources, strict=True):
                self.emit(RULE_NUMBERS[f"{name}.b32"], instruction, [part, self.register(x, 32)])
            self.emit(RULE_NUMBERS[opcode], instruction, [self.register(result, 1), *parts])

    def load_parameter(self, instruction: Instruction) -> None:
        result, address = self.expect(instruction, 2)
        kind = instruction.opcode.removeprefix("ld.param.")
        if not isinstance(address, Address) or address.offset or address.base not in self.values:
            raise self.error(f"unknown parameter {address}")
        value, bits = self.values[address.base]
        if kind == "s32" and bits == 32 and isinstance(result, Register) and self.bits_of(result.name) == 64:
            value, bits = value - ((value >> 31) << 32), 64
        elif _PARAMETER_BITS.get(kind) != bits:
            raise self.error(f"unknown instruction {instruction.opcode}")
        self.emit(RULE_NUMBERS[f"mov.b{bits}"], instruction, [self.register(result, bits), self.constant(value, bits)])

    def memory(self, instruction: Instruction, found: re.Match[str]) -> None:
        kind, space, count, letter, width = found.groups()
        operands = self.expect(instruction, 2)
        value, address = operands if kind == "ld" else operands[::-1]
        bits = int(width)
        # A register may be wider than the access: loads extend, stores take the low bits.
        allowed: tuple[int, ...] = {8: (16, 32), 16: (16, 32), 32: (32, 64), 64: (64,)}[bits]
        if letter == "s" and bits < 32:
            raise self.error(f"unknown instruction {instruction.opcode}")
        if isinstance(value, Register):
            value = Vector((value,))
        if not isinstance(value, Vector):
            raise self.error(f"registers are expected instead of {value}")
        rows = self.vector(value, int(count or 1), *allowed)
        base, offset = self.address(address, 64 if space == "global" else 32)
        name = f"OP_{'LOAD' if kind == 'ld' else 'STORE'}_{space.upper()}"
        wide = {self.bits_of(part.name) == 64 for part in value.parts if part.name != "_"}
        if len(wide) > 1:
            raise self.error("registers of different widths")
        self.emit(name, instruction, rows, [len(rows), bits // 8, letter == "s", wide == {True}], offset, base)

    def vector(self, operand: Operand, count: int, *allowed: int) -> list[int]:
        if not isinstance(operand, Vector) or len(operand.parts) != count:
            raise self.error(f"{count} registers are expected instead of {operand}")
        return [self.register(part, *allowed) for part in operand.parts]

    def address(self, operand: Operand, bits: int) -> tuple[int, int]:
        if not isinstance(operand, Address):
            raise self.error(f"an address is expected instead of {operand}")
        base: Operand = Register(operand.base) if operand.base.startswith("%") else Symbol(operand.base)
        return self.source(base, bits), operand.offset


def encode(program: Program, arguments: Sequence[Argument], grid: int, poison: int) -> Encoded:
    """Encode a program for one launch. Registers hold the poison at the start."""
    return Encoder(program, arguments, grid, poison).encode()
