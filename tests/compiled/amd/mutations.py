"""Places of gfx942 assembly that can be mutated, by kind, with the instruction that takes the place."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .text import Statement, read_kernel

_REMOVED = (
    ("barrier removed", r"s_barrier$"),
    ("wait removed", r"s_waitcnt$"),
    ("matrix instruction removed", r"v_mfma_"),
    ("global store removed", r"(buffer|global)_store_"),
    ("shared store removed", r"ds_write"),
    ("shared load removed", r"ds_read"),
)


def places(text: str) -> Iterator[tuple[str, int, str | None]]:
    """Kind, line, and the new instruction or None to remove the old one."""
    statements = read_kernel(text).statements
    invalid = {s.operands[0] for s in statements if s.opcode.startswith("v_bfrev_b32") and s.operands[1] == "1"}
    for index, statement in enumerate(statements):
        opcode, operands = statement.opcode, statement.operands
        for kind, pattern in _REMOVED:
            if re.match(pattern, opcode):
                yield kind, statement.line, None
        if opcode == "s_and_saveexec_b64":
            yield "guard of an access removed", statement.line, f"s_mov_b64 {operands[0]}, exec"
        guarded = _guarded(statement, invalid)
        if guarded is not None and _is_offset(operands[0], statements[index + 1 : index + 40]):
            yield "guard of an access removed", statement.line, f"v_mov_b32_e32 {operands[0]}, {guarded}"
        if opcode.startswith("v_mfma_") and operands[1] != operands[2]:
            yield "registers swapped", statement.line, _written(statement, (0, 2, 1, 3))
        if re.match(r"ds_write2|v_sub_f32|v_sub_u32", opcode) and operands[1] != operands[2]:
            yield "registers swapped", statement.line, _written(statement, (0, 2, 1))
        if re.match(r"ds_|(buffer|global)_", opcode) and "permute" not in opcode and "swizzle" not in opcode:
            yield "offset changed", statement.line, _moved(statement)


def _guarded(statement: Statement, invalid: set[str]) -> str | None:
    """The offset of a `v_cndmask` that selects an invalid one where the guard is false."""
    if not statement.opcode.startswith("v_cndmask_b32_e") or len(statement.operands) != 4:
        return None
    _, otherwise, offset, _ = statement.operands
    return offset if otherwise in invalid and offset not in invalid else None


def _is_offset(register: str, behind: tuple[Statement, ...]) -> bool:
    """Whether a buffer instruction uses the register as its offset before it is written again."""
    for statement in behind:
        if statement.opcode.startswith("buffer_") and statement.operands[1] == register:
            return True
        if statement.operands and statement.operands[0] == register:
            return False
    return False


def _written(statement: Statement, order: tuple[int, ...]) -> str:
    operands = ", ".join(statement.operands[place] for place in order)
    return " ".join((statement.opcode, operands, *statement.modifiers))


def _moved(statement: Statement) -> str:
    """The instruction with another offset: by one element of its width, at least 4 bytes."""
    size = {"b64": 8, "b128": 16, "dwordx2": 8, "dwordx4": 16}.get(statement.opcode.split("_")[-1], 4)
    two = "2" in statement.opcode.split("_")[1]
    name, step = ("offset1", 1) if two else ("offset", size)
    modifiers = [m for m in statement.modifiers if not m.startswith(f"{name}:")]
    old = next((int(m.split(":")[1]) for m in statement.modifiers if m.startswith(f"{name}:")), 0)
    new = old + step if old + step < (256 if two else 4096) else old - step
    return " ".join((statement.opcode, ", ".join(statement.operands), *modifiers, f"{name}:{new}"))
