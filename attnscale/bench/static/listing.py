"""Assembly as a graph of blocks, and the loops in it: SASS as nvdisasm prints it, GCN as LLVM does."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


class Loop(NamedTuple):
    """A natural loop: its blocks, of which the first is the header."""

    header: int
    blocks: frozenset[int]
    instructions: tuple[Instruction, ...]


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
        if label := _GCN_LABEL.match(line):
            lines.append(label[1])
        elif found := _GCN.match(line):
            opcode = found["opcode"]
            branches = opcode.startswith(("s_branch", "s_cbranch"))
            target = found["rest"].strip() if branches else None
            lines.append(Instruction(opcode, target, opcode not in ("s_branch", "s_endpgm", "s_setpc_b64")))
            if opcode == "s_endpgm":
                break  # what follows is padding and data
    return _blocks(lines)


def loops(blocks: list[Block]) -> list[Loop]:
    """Natural loops: those of back edges, whose target every way to their source passes.

    A branch upwards alone is no sign of a loop: ptxas puts the wait for a barrier behind the end of the kernel, from
    where it jumps back into the middle of the loop that it belongs to.
    """
    dominators = _dominators(blocks)
    before = _predecessors(blocks)
    bodies: dict[int, set[int]] = {}
    for source, block in enumerate(blocks):
        for header in block.successors:
            if header not in dominators[source]:
                continue
            body = bodies.setdefault(header, {header})
            pending = [source]
            while pending:
                index = pending.pop()
                if index not in body:
                    body.add(index)
                    pending.extend(before[index])
    return [
        Loop(header, frozenset(body), tuple(step for index in sorted(body) for step in blocks[index].instructions))
        for header, body in sorted(bodies.items())
    ]


def innermost(found: Iterable[Loop]) -> list[Loop]:
    """The loops that hold no other, but for waits for a barrier, which are loops of a few instructions."""
    kept = [loop for loop in found if len(loop.instructions) > 16]
    return [loop for loop in kept if not any(other.blocks < loop.blocks for other in kept)]


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


def _predecessors(blocks: list[Block]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(index)
    return before


def _dominators(blocks: list[Block]) -> list[frozenset[int]]:
    """For each block those that every way from the entry to it passes; none for blocks that nothing leads to."""
    before = _predecessors(blocks)
    reachable: set[int] = set()
    pending = [0]
    while pending:
        index = pending.pop()
        if index not in reachable:
            reachable.add(index)
            pending.extend(blocks[index].successors)
    everything = frozenset(reachable)
    dominators = [everything if index in reachable else frozenset[int]() for index in range(len(blocks))]
    dominators[0] = frozenset({0})
    changed = True
    while changed:
        changed = False
        for index in sorted(reachable - {0}):
            ways = [dominators[way] for way in before[index] if way in reachable]
            updated = frozenset.intersection(*ways) | {index}
            if updated != dominators[index]:
                dominators[index], changed = updated, True
    return dominators
