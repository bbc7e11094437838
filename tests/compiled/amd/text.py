"""The text of a gfx942 kernel: instructions with operands and modifiers, labels, and what the descriptor declares."""

from __future__ import annotations

import re
from typing import NamedTuple


class ProgramError(ValueError):
    """The text holds something that the executor does not know. Nothing is ever skipped."""


class Statement(NamedTuple):
    """One instruction as written."""

    line: int  # of the text, from 1
    opcode: str
    operands: tuple[str, ...]
    modifiers: tuple[str, ...]

    def error(self, reason: str) -> ProgramError:
        """An error that names the instruction."""
        written = " ".join((self.opcode, ", ".join(self.operands), *self.modifiers)).strip()
        return ProgramError(f"line {self.line}: {written!r}: {reason}")


class KernelText(NamedTuple):
    """A kernel's instructions and declarations."""

    name: str
    statements: tuple[Statement, ...]
    labels: dict[str, int]  # label → index of the statement that follows
    preloaded_entry: int  # statement where execution starts if the hardware has preloaded arguments
    declared: dict[str, int]  # .amdhsa_ directives
    arguments: tuple[tuple[int, int, str], ...]  # offset, size and value kind, from the metadata


# Directives inside of a function that leave no trace in the code.
_SILENT = (".loc", ".file", ".p2align", ".cfi_")


def read_kernel(text: str) -> KernelText:
    """Parse the assembly text of a module with one kernel."""
    found = re.search(r"^\s*\.amdhsa_kernel (\S+)", text, re.M)
    if found is None:
        raise ProgramError("no .amdhsa_kernel in the text")
    target = re.search(r'^\s*\.amdgcn_target "([^"]*)"', text, re.M)
    if target is None or not target[1].split("--")[-1].startswith("gfx942"):
        raise ProgramError(f"the target is {target and target[1]!r}, not gfx942")
    name = found[1]
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    inside = False
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.split(";")[0].strip()
        if line == f"{name}:":
            inside = True
        elif inside and line.startswith(".section"):  # the descriptor follows
            break
        elif inside and line:
            if line.endswith(":"):
                labels[line[:-1]] = len(statements)
            elif not line.startswith("."):
                statements.append(_statement(number, line))
            elif not line.startswith(_SILENT):
                raise ProgramError(f"line {number}: unknown directive {line!r}")
    declared = {
        key: int(value, 0) for key, value in re.findall(r"^\s*\.amdhsa_(\w+) (\w+)$", text, re.M) if value != name
    }
    entry = _preloaded_entry(statements, labels) if declared.get("user_sgpr_kernarg_preload_length") else 0
    return KernelText(name, tuple(statements), labels, entry, declared, _arguments(text))


def _statement(number: int, line: str) -> Statement:
    opcode, _, rest = line.partition(" ")
    if "\t" in opcode:
        opcode, _, rest = line.partition("\t")
    pieces = _split(rest.strip(), ",")
    if opcode == "s_waitcnt":
        return Statement(number, opcode, (), tuple(rest.split()))
    operands, modifiers = [], []
    for index, piece in enumerate(pieces):
        first, *words = _split(piece.strip(), " ")
        operands.append(first)
        if words and index < len(pieces) - 1:
            raise ProgramError(f"line {number}: {line!r}: {words} follow an operand that is not the last")
        modifiers += words
    return Statement(number, opcode, tuple(operands), tuple(modifiers))


def _split(text: str, sign: str) -> list[str]:
    """Split outside of brackets."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "[(") - (character in "])")
        if character == sign and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in (*parts, text[start:]) if part]


def _preloaded_entry(statements: list[Statement], labels: dict[str, int]) -> int:
    """The prologue loads the preloaded arguments and branches to the code that hardware with preloading starts at."""
    branch = next(i for i, statement in enumerate(statements) if statement.opcode == "s_branch")
    if any(s.opcode.split("_dword")[0] not in ("s_load", "s_waitcnt") for s in statements[:branch]):
        raise statements[branch].error("the loading prologue holds more than loads")
    return labels[statements[branch].operands[0]]


def _arguments(text: str) -> tuple[tuple[int, int, str], ...]:
    block = text[text.index(".amdgpu_metadata") : text.index(".end_amdgpu_metadata")]
    listed = block[block.index(".args:") : block.index(".group_segment_fixed_size")]
    pattern = r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)"
    found = re.findall(pattern, listed)
    if len(found) != listed.count(".value_kind"):
        raise ProgramError("an argument in the metadata has no offset, size or kind")
    return tuple((int(offset), int(size), kind) for offset, size, kind in found)
