"""Parser of PTX text: the parameters of the kernel, and its instructions with labels as indices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class PtxError(ValueError):
    """Text that the executor does not know."""


class Register(NamedTuple):
    """A register, or `_` for a result that is thrown away."""

    name: str


class Literal(NamedTuple):
    """A number: an integer, or the bits of a floating-point number."""

    value: int
    kind: str  # "int", "f32" or "f64"


class Vector(NamedTuple):
    """Registers in braces."""

    parts: tuple[Register, ...]


class Address(NamedTuple):
    """A register or symbol plus bytes, in brackets."""

    base: str
    offset: int


class Symbol(NamedTuple):
    """A label, shared memory, or a parameter."""

    name: str


class Pair(NamedTuple):
    """Two results with a bar between them."""

    first: Register
    second: Register


class Place(NamedTuple):
    """Where a box begins in a tensor: the register of its map, and coordinates."""

    map: Register
    coordinates: Vector


Operand = Register | Literal | Vector | Address | Symbol | Pair | Place


class Instruction(NamedTuple):
    """One instruction."""

    line: int
    text: str
    predicate: str | None
    negated: bool
    opcode: str
    operands: tuple[Operand, ...]


class Program(NamedTuple):
    """A kernel."""

    parameters: tuple[tuple[str, str], ...]  # names and types
    threads: int  # per block
    registers: dict[str, int]  # bits by prefix of the name
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the next instruction


REGISTER_BITS = {".pred": 1, ".b16": 16, ".b32": 32, ".b64": 64, ".f32": 32, ".f64": 64}
_HEAD = re.compile(r"\.visible \.entry (\w+)\s*\((.*?)\)\s*((?:\.\w+\s+[\d, ]+\s*)*)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.(\w+)(?: \.ptr \.global \.align \d+)?|\.align 64 \.b8) (\w+)(\[128\])?$")
_REGISTERS = re.compile(r"\.reg (\.\w+)\s+(%[a-zA-Z]+)<\d+>$")
_SCOPED = re.compile(r"\.reg (\.\w+)\s+(\w+)$")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+|[a-z]\w*)\s+)?([a-z][\w.:]*)(?:\s+(.*))?$", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*(%?[\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
_PLACE = re.compile(r"\[\s*(%\w+),\s*(\{.*\})\s*\]$")
_KNOWN_HEADER = re.compile(
    r"\.version [\d.]+|\.target \w+(?:, \w+)*|\.address_size 64|\.extern \.shared \.align \d+ \.b8 global_smem\[\];"
    r"|\.global \.align \d+ \.b8 [\w$]+\[\d+\] = \{[\d, ]+\};"
)
_LIMITS = re.compile(r"\.(reqntid|maxntid|maxnreg|minnctapersm) +(\d+)(?:, 1, 1)?")


def parse(text: str) -> Program:
    """Parse the text of one kernel."""
    clean = re.sub(r"//[^\n]*", "", text)
    head = _HEAD.search(clean)
    if head is None:
        raise PtxError("no .visible .entry")
    for statement in clean[: head.start()].split("\n"):
        if statement.strip() and not _KNOWN_HEADER.fullmatch(statement.strip()):
            raise PtxError(f"unknown directive {statement.strip()!r}")
    parameters = []
    for part in filter(None, (x.strip() for x in head[2].split(","))):
        found = _PARAMETER.match(part)
        if found is None or bool(found[1]) == bool(found[3]):
            raise PtxError(f"unknown parameter {part!r}")
        parameters.append((found[2], found[1] or "map"))
    threads = 0
    for limit in filter(None, (x.strip() for x in head[3].split("\n"))):
        found = _LIMITS.fullmatch(limit)
        if found is None:
            raise PtxError(f"unknown directive {limit!r}")
        threads = int(found[2]) if found[1] == "reqntid" else threads
    registers: dict[str, int] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    scoped: dict[str, Operand] = {}  # registers and labels of inner braces, with unique names
    depth = 0
    first = clean.count("\n", 0, head.end()) + 1
    for line, statement in _statements(clean[head.end() :], first):
        if statement.endswith(":"):
            label = Symbol(f"{statement[:-1]}_line{line}_" if depth else statement[:-1])
            labels[label.name] = len(instructions)
            if depth:
                scoped[statement[:-1]] = label
        elif statement in ("{", "}"):
            depth += 1 if statement == "{" else -1
            scoped.clear()
        elif statement.startswith(".reg"):
            declared, single = _REGISTERS.match(statement), _SCOPED.match(statement)
            found = declared or single
            kind, name = found.groups() if found else ("", "")
            if kind not in REGISTER_BITS:
                raise PtxError(f"line {line}: unknown declaration {statement!r}")
            if single:
                unique = Register(f"%{name}_line{line}_")
                scoped[name], name = unique, unique.name
            registers[name] = REGISTER_BITS[kind]
        elif not re.match(r"\.(loc|pragma)\s", statement):
            instructions.append(_instruction(line, statement, scoped))
    return Program(tuple(parameters), threads, registers, tuple(instructions), labels)


def _statements(body: str, first: int) -> Iterator[tuple[int, str]]:
    """Labels, directives and instructions up to the end of the kernel, with their lines."""
    pending, started, depth = "", first, 0
    for line, raw in enumerate(body.split("\n"), first):
        rest = raw.strip()
        if not pending:
            started = line
            if rest == "}" and not depth:
                return
            if rest.startswith(".loc"):
                yield line, rest
                continue
        pending = f"{pending} {rest}".strip()
        while pending:
            if pending[0] in "{}":
                depth += 1 if pending[0] == "{" else -1
                yield started, pending[0]
                pending = pending[1:].strip()
                continue
            label = re.match(r"(\$?[A-Za-z_$][\w$]*:)\s*", pending)
            if label:
                yield started, label[1]
                pending = pending[label.end() :]
                continue
            statement, semicolon, after = pending.partition(";")
            if not semicolon:
                break
            yield started, statement.strip()
            pending, started = after.strip(), line
    raise PtxError("the kernel has no end")


def _instruction(line: int, statement: str, scoped: dict[str, Operand]) -> Instruction:
    found = _INSTRUCTION.match(statement)
    if found is None:
        raise PtxError(f"line {line}: cannot read {statement!r}")
    negated, predicate, opcode, rest = found.groups()
    if predicate is not None and not predicate.startswith("%"):
        named = scoped.get(predicate)
        if not isinstance(named, Register):
            raise PtxError(f"line {line}: unknown predicate {predicate!r}")
        predicate = named.name
    operands = tuple(_operand(line, part, scoped) for part in _split(rest or ""))
    return Instruction(line, " ".join(statement.split()), predicate, bool(negated), opcode, operands)


def _split(rest: str) -> Iterator[str]:
    """Operands between commas outside of brackets and braces."""
    depth, part = 0, ""
    for letter in rest:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def _operand(line: int, text: str, scoped: dict[str, Operand]) -> Operand:
    if text in scoped:
        return scoped[text]
    if text == "_" or re.fullmatch(r"%[a-zA-Z]+\d+|%\w+\.\w+", text):
        return Register(text)
    if re.fullmatch(r"-?\d+U?|-?0[xX][0-9A-Fa-f]+U?", text):
        return Literal(int(text.rstrip("U"), 0), "int")
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}|0[dD][0-9A-Fa-f]{16}", text):
        return Literal(int(text[2:], 16), "f32" if text[1] in "fF" else "f64")
    if text.startswith("{") and text.endswith("}"):
        parts = [_operand(line, part, scoped) for part in _split(text[1:-1])]
        registers = tuple(part for part in parts if isinstance(part, Register))
        if len(registers) == len(parts):
            return Vector(registers)
    address = _ADDRESS.match(text)
    if address:
        return Address(address[1], int(address[2] or 0))
    if place := _PLACE.match(text):
        coordinates = _operand(line, place[2], scoped)
        if isinstance(coordinates, Vector):
            return Place(Register(place[1]), coordinates)
    if "|" in text:
        first, second = (_operand(line, part, scoped) for part in text.split("|", 1))
        if isinstance(first, Register) and isinstance(second, Register):
            return Pair(first, second)
    if re.fullmatch(r"[\w$]+", text):
        return Symbol(text)
    raise PtxError(f"line {line}: unknown operand {text!r}")
