"""Control-flow graph of assembly, and its natural loops: nesting and execution order.

Input is SASS as printed by nvdisasm, or GCN as printed by LLVM.
"""

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

# Barrier waits are loops of a few instructions and are counted as part of the surrounding code.
LONGEST_WAIT = 16


class Instruction(NamedTuple):
    """One instruction and its control flow."""

    opcode: str
    target: str | None = None  # branch target
    falls_through: bool = True


class Block(NamedTuple):
    """A basic block and its successors."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


def parse_sass(text: str) -> list[Block]:
    """Parse a kernel listing of `nvdisasm -c` into basic blocks."""
    lines: list[str | Instruction] = []
    for line in text.splitlines():
        if label := _SASS_LABEL.match(line):
            lines.append(label[1])
        elif found := _SASS.match(line):
            lines.append(_sass_instruction(found["opcode"], found["rest"], bool(found["predicate"])))
    return _blocks(lines)


def parse_gcn(text: str) -> list[Block]:
    """Parse a kernel listing of Triton's `asm["amdgcn"]` into basic blocks."""
    lines: list[str | Instruction] = []
    for line in text.splitlines():
        if line.startswith(".Lfunc_end"):
            break  # not at `s_endpgm`: blocks may follow it
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
        # ptxas emits some jumps as calls of labels in the same kernel; other calls return.
        falls = conditional or target is None
        return Instruction(opcode, None if target is None else target[1], falls)
    return Instruction(opcode, None, predicated or name not in ("EXIT", "RET"))


def _blocks(lines: list[str | Instruction]) -> list[Block]:
    """Split labels and instructions into basic blocks, before labels and after branches."""
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


class Loop(NamedTuple):
    """A natural loop: its instructions outside inner loops, and the inner loops in execution order."""

    own: tuple[Instruction, ...]
    inner: tuple[Loop, ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions of one iteration, with each inner loop running once."""
        return sum((loop.instructions for loop in self.inner), self.own)


def loop_nest(blocks: list[Block]) -> Loop:
    """Return the kernel as a pseudo-loop that runs once; its `inner` are the outermost loops."""
    order = _reverse_postorder(blocks)
    bodies = {
        header: body
        for header, body in _natural_loops(blocks, order).items()
        if sum(len(blocks[index].instructions) for index in body) > LONGEST_WAIT
    }
    ranked = sorted(bodies, key=order.index)

    def nest(own: frozenset[int], headers: list[int]) -> Loop:
        outermost = [h for h in headers if not any(bodies[h] < bodies[other] for other in headers)]
        inner = [nest(bodies[h], [other for other in headers if bodies[other] < bodies[h]]) for h in outermost]
        rest = own.difference(*(bodies[h] for h in outermost))
        return Loop(tuple(step for index in sorted(rest) for step in blocks[index].instructions), tuple(inner))

    return nest(frozenset(order), ranked)


def _natural_loops(blocks: list[Block], order: list[int]) -> dict[int, frozenset[int]]:
    """Return the blocks of each natural loop by its header, from back edges to a dominator.

    A backward branch alone does not imply a loop: ptxas places barrier waits after the end of the kernel and jumps back
    from there into the middle of the enclosing loop.
    """
    before = _predecessors(blocks, order)
    dominators = _dominators(order, before)
    bodies: dict[int, set[int]] = {}
    for source in order:
        for header in blocks[source].successors:
            if header not in dominators[source]:
                continue
            body = bodies.setdefault(header, {header})
            pending = [source]
            while pending:
                index = pending.pop()
                if index not in body:
                    body.add(index)
                    pending.extend(before[index])
    return {header: frozenset(body) for header, body in bodies.items()}


def _reverse_postorder(blocks: list[Block]) -> list[int]:
    """Return reachable blocks in reverse postorder, which is the execution order of loops.

    Addresses do not give this order, because assemblers reorder blocks.
    """
    finished: list[int] = []
    seen = {0}
    pending = [(0, iter(blocks[0].successors))]
    while pending:
        index, successors = pending[-1]
        following = next((step for step in successors if step not in seen), None)
        if following is None:
            finished.append(index)
            pending.pop()
        else:
            seen.add(following)
            pending.append((following, iter(blocks[following].successors)))
    return finished[::-1]


def _predecessors(blocks: list[Block], order: list[int]) -> dict[int, list[int]]:
    before: dict[int, list[int]] = {index: [] for index in order}
    for index in order:
        for successor in blocks[index].successors:
            before[successor].append(index)
    return before


def _dominators(order: list[int], before: dict[int, list[int]]) -> dict[int, frozenset[int]]:
    """Return the dominators of each block."""
    dominators = dict.fromkeys(order, frozenset(order))
    dominators[order[0]] = frozenset(order[:1])
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            updated = frozenset.intersection(*(dominators[way] for way in before[index])) | {index}
            if updated != dominators[index]:
                dominators[index], changed = updated, True
    return dominators
