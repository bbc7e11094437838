"""The loops of a kernel, found by their back edges: which lie inside which, and in what order they run."""

from __future__ import annotations

from typing import NamedTuple

from attnscale.bench.static.listing import Block, Instruction

# A wait for a barrier is a loop of a few instructions, and part of what stands around it.
LONGEST_WAIT = 16


class Loop(NamedTuple):
    """A natural loop: its instructions outside of inner loops, and those loops in the order they run."""

    own: tuple[Instruction, ...]
    inner: tuple[Loop, ...]

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """All of one pass in which every inner loop runs once."""
        return sum((loop.instructions for loop in self.inner), self.own)


def loop_nest(blocks: list[Block]) -> Loop:
    """The whole kernel as if it were a loop that runs once, so that its `inner` are the outermost loops."""
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
    """Blocks of each loop by its header: those of back edges, whose target every way to their source passes.

    A branch upwards alone is no sign of a loop: ptxas puts the wait for a barrier behind the end of the kernel, from
    where it jumps back into the middle of the loop that it belongs to.
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
    """Blocks that can be reached, each before those it leads to but for ways back: the order in which loops run.

    Addresses are no such order, since assemblers lay blocks out as they like.
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
    """For each block those that every way from the entry to it passes."""
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
