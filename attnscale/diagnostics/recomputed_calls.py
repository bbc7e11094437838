"""Which call of the forward pass is repeated by a call inside backward.

A reentrant checkpoint runs its forward without a graph, and once more inside backward with one, so that no graph leads
from the second run to the first. Autograd numbers its nodes in the order in which they are made. The node of the
checkpoint is made before its forward runs: the calls it holds are the first that come after its number.
"""

from __future__ import annotations

from collections import deque

import torch

# The number of a call that is not known.
UNKNOWN = -1


class Origins:
    """The calls of one layer that were made without a graph, by autograd's count at the time."""

    def __init__(self, most: int) -> None:
        self._forwards: deque[tuple[int, int]] = deque(maxlen=most)  # count, number of the call
        self._forgotten = -1  # the count of the last one that was dropped
        self._repeats: list[tuple[int, int]] = []  # the same of calls that were repeated without a graph in turn
        self._run: object = None  # of a checkpoint inside backward
        self._left: list[int] = []  # the calls that this run has not repeated yet, the next one last

    def add(self, number: int) -> None:
        """A call in forward."""
        if len(self._forwards) == self._forwards.maxlen:
            self._forgotten = self._forwards[0][0]
        self._forwards.append((_count(), number))

    def repeated(self, graph: bool) -> int:
        """The number of the call that the one being made inside backward repeats, with a graph or, in nested
        checkpoints, without; UNKNOWN where that cannot be told.
        """
        node = torch._C._current_autograd_node()
        # The backward of a compiled graph may compute calls again too, but has no node of its own for each of them.
        if node is None or node.name() == "CompiledFunctionBackward":
            return UNKNOWN
        start = node._sequence_nr()
        run = torch._C._current_graph_task_id(), start
        if self._run != run:
            # Calls that were made after the node; if that was made inside backward, calls repeated there.
            later = [number for count, number in self._repeats if count > start]
            if not later and self._forgotten <= start:
                later = [number for count, number in self._forwards if count > start]
            self._run, self._left = run, later[::-1]
        number = self._left.pop() if self._left else UNKNOWN
        if not graph and number != UNKNOWN:
            self._repeats.append((_count(), number))
        return number

    def answered(self, number: int) -> None:
        """Backward has come to a call: what repeated it is done."""
        self._repeats = [repeat for repeat in self._repeats if repeat[1] != number]


def _count() -> int:
    """How many nodes autograd has made on this thread."""
    return torch._C._autograd._get_sequence_nr()
