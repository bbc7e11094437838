"""Assembly as a graph of blocks: SASS as nvdisasm prints it, GCN as LLVM does."""

from __future__ import annotations

import re
from typing import NamedTuple

_SASS = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)(?P<rest>[^;]*);"
)
_SASS_LABEL = re.compile(r"^\s*(\.L_x_\w+):")
_SASS_TARGET = re.compile(r"\(?(\.L_x_\w+)\)?")
_GCN = re.compile(r"^\s+(?P<opcode>[a-z][a-z0-9]*_[a-z0-9_]+)(?P<rest>[^;]*)")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")


class Instruction(NamedTuple):
    """One instruction, and where control may go from it."""

    opcode: str
    target: str | None = None  # the label of a branch
    falls_through: bool = True


class Block(NamedTuple):
    """Instructions that run one after the other, and the blocks that may follow."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


def parse_sass(text: str) -> list[Block]:
    """The blocks of a kernel as `nvdisasm -c` prints it."""
    lines: list[str | Instruction] = []
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            lines.append(label[1])
        elif found := _SASS.match(line):
            lines.append(_sass_instruction(found["opcode"], found["rest"], bool(found["predicate"])))
    return _blocks(lines)


def parse_gcn(text: str) -> list[Block]:
    """The blocks of a kernel as triton keeps it in `asm["amdgcn"]`."""
    lines: list[str | Instruction] = []
    for line in text.splitlines():
        if line.startswith(".Lfunc_end"):
            break  # not at `s_endpgm`: blocks may be laid out behind it
        if label := _GCN_LABEL.match(line):
            lines.append(label[1])
        elif found := _GCN.match(line):
            opcode = found["opcode"]
            branches = opcode.startswith(("s_branch", "s_cbranch"))
            target = found["rest"].strip() if branches else None
            lines.append(Instruction(opcode, target, opcode not in ("s_branch", "s_endpgm", "s_setpc_b64")))
    return _blocks(lines)


def _sass_instruction(opcode: str, rest: str, predicated: bool) -> Instruction:
    name = opcode.split(".")[0]
    if name in ("BRA", "CALL", "BRX", "JMP"):
        target = _SASS_TARGET.search(rest)
        conditional = predicated or bool(re.match(r"\s*!?U?P\d", rest))
        # A call of a label of the kernel itself is a jump that ptxas writes so; any other comes back.
        falls = conditional or target is None
        return Instruction(opcode, None if target is None else target[1], falls)
    return Instruction(opcode, None, predicated or name not in ("EXIT", "RET"))


def _blocks(lines: list[str | Instruction]) -> list[Block]:
    """Blocks from labels and instructions in order: one ends before a label and after a branch."""
    starts: dict[str, int] = {}
    bodies: list[list[Instruction]] = [[]]
    for line in lines:
        if isinstance(line, str):
            if bodies[-1]:
                bodies.append([])
            starts[line] = len(bodies) - 1
        else:
            bodies[-1].append(line)
            if line.target is not None or not line.falls_through:
                bodies.append([])
    blocks = []
    for index, body in enumerate(bodies):
        following: list[int] = []
        if (not body or body[-1].falls_through) and index + 1 < len(bodies):
            following.append(index + 1)
        if body and body[-1].target in starts:
            following.append(starts[body[-1].target])
        blocks.append(Block(tuple(body), tuple(dict.fromkeys(following))))
    return blocks
