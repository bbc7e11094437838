"""Sums of rows that wait to become quantities: those of all layers together, a few operators for what would be many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attnscale.diagnostics.gather import Spread
from attnscale.diagnostics.rows import backward_quantities, forward_quantities


class Pending:
    """What one layer has shown: the spread of its quantities, and the sums of calls that are not in it yet."""

    # Numbers that may wait in a layer; what is more is settled at once, so that memory does not grow with it.
    SMALL: ClassVar[int] = 2**15

    def __init__(self) -> None:
        self.forward: Spread | None = None
        self.backward: Spread | None = None
        self._looks: list[tuple[Tensor, ...]] = []
        self._answers: list[tuple[Tensor, ...]] = []
        self._numbers = 0

    def add_forward(self, sums: Tensor) -> None:
        """The sums [B, H, R, C] of a call."""
        self._add(self._looks, sums)

    def add_backward(self, sums: Tensor, gradients: Tensor) -> None:
        """The same as backward sees them, and what it says of their gradients, [B, H, R, 2]."""
        self._add(self._answers, sums, gradients)

    def _add(self, waiting: list[tuple[Tensor, ...]], *found: Tensor) -> None:
        waiting.append(found)
        self._numbers += sum(part.numel() for part in found)
        if self._numbers > self.SMALL:
            settle([self])

    @staticmethod
    def take(every: Iterable[Pending]) -> tuple[list[tuple[Pending, tuple[Tensor, ...]]], ...]:
        """All that waits, forward and backward, with whose it is; then nothing does."""
        every = list(every)
        looks = [(one, found) for one in every for found in one._looks]
        answers = [(one, found) for one in every for found in one._answers]
        for one in every:
            one._looks, one._answers, one._numbers = [], [], 0
        return looks, answers


def settle(every: Iterable[Pending]) -> None:
    """Let nothing wait any more."""
    looks, answers = Pending.take(every)
    for one, spread in _spreads(looks, forward_quantities):
        one.forward = spread if one.forward is None else one.forward.merge(spread)
    for one, spread in _spreads(answers, backward_quantities):
        one.backward = spread if one.backward is None else one.backward.merge(spread)


def _spreads(
    waiting: Sequence[tuple[Pending, tuple[Tensor, ...]]], quantities: Callable[..., Tensor]
) -> Iterable[tuple[Pending, Spread]]:
    """The spread of each call, those of one shape together."""
    alike: dict[object, list[tuple[Pending, tuple[Tensor, ...]]]] = {}
    for one, found in waiting:
        alike.setdefault((found[0].shape, found[0].dtype, found[0].device), []).append((one, found))
    for group in alike.values():
        columns = zip(*(found for _, found in group), strict=True)
        rows = quantities(*(torch.stack(column) for column in columns))  # [Q, N, B, H, R]
        spread = Spread.of(rows.transpose(2, 3).flatten(3))  # [Q, N, H, B·R]
        for index, (one, _) in enumerate(group):
            yield one, Spread(*(part[:, index] for part in spread))
