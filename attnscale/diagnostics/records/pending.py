"""Sums of rows that wait to become quantities: those of all layers together, a few operators for what would be many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from attnscale._util.uncopied import Uncopied
from attnscale.diagnostics.records.spread import Spread, row_keys
from attnscale.statistics.rows.quantities import backward_quantities, forward_quantities


class Found(NamedTuple):
    """What was found of the rows of one call, and the salt of their keys, which no two calls of a step share."""

    parts: tuple[Tensor, ...]
    salt: int


class Pending(Uncopied):
    """What one layer has shown: the spread of its quantities, and the sums of calls that are not in it yet."""

    # Numbers that may wait in a layer; what is more is settled at once, so that memory does not grow with it.
    SMALL: ClassVar[int] = 2**15

    def __init__(self) -> None:
        self.forward: Spread | None = None
        self.backward: Spread | None = None
        self._looks: list[Found] = []
        self._answers: list[Found] = []
        self._numbers = 0

    def add_forward(self, sums: Tensor, salt: int = 0) -> None:
        """The sums [B, H, R, C] of a call."""
        self._add(self._looks, Found((sums,), salt))

    def add_backward(self, sums: Tensor, gradients: Tensor, salt: int = 0) -> None:
        """The same as backward sees them, and what it says of their gradients, [B, H, R, 2]."""
        self._add(self._answers, Found((sums, gradients), salt))

    @property
    def has_forward(self) -> bool:
        """Whether there are rows of forward."""
        return self.forward is not None or bool(self._looks)

    @property
    def has_backward(self) -> bool:
        """Whether there are rows of backward."""
        return self.backward is not None or bool(self._answers)

    @property
    def numbers(self) -> int:
        """How many numbers are held."""
        spreads = (self.forward, self.backward)
        return self._numbers + sum(spread.sample.numel() for spread in spreads if spread is not None)

    def absorb(self, other: Pending) -> None:
        """Take over what another one holds; it is empty then."""
        self.forward = _merged(self.forward, other.forward)
        self.backward = _merged(self.backward, other.backward)
        self._looks += other._looks
        self._answers += other._answers
        self._numbers += other._numbers
        other.forward = other.backward = None
        other._looks, other._answers, other._numbers = [], [], 0
        if self._numbers > self.SMALL:
            settle([self])

    def _add(self, waiting: list[Found], found: Found) -> None:
        waiting.append(found)
        self._numbers += sum(part.numel() for part in found.parts)
        if self._numbers > self.SMALL:
            settle([self])

    @staticmethod
    def take(every: Iterable[Pending]) -> tuple[list[tuple[Pending, Found]], ...]:
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
        one.forward = _merged(one.forward, spread)
    for one, spread in _spreads(answers, backward_quantities):
        one.backward = _merged(one.backward, spread)


def _merged(one: Spread | None, other: Spread | None) -> Spread | None:
    if one is None or other is None:
        return other if one is None else one
    return one.merge(other)


def _spreads(
    waiting: Sequence[tuple[Pending, Found]], quantities: Callable[..., Tensor]
) -> Iterable[tuple[Pending, Spread]]:
    """The spread of each call, those of one shape together."""
    alike: dict[object, list[tuple[Pending, Found]]] = {}
    for one, found in waiting:
        like = found.parts[0]
        alike.setdefault((like.shape, like.dtype, like.device), []).append((one, found))
    for group in alike.values():
        columns = zip(*(found.parts for _, found in group), strict=True)
        rows = quantities(*(torch.stack(column) for column in columns))  # [Q, N, B, H, R]
        rows = rows.transpose(2, 3).flatten(3)  # [Q, N, H, B·R]
        salts = {found.salt for _, found in group}
        keys = {salt: row_keys(salt, rows.shape[-1], rows.device) for salt in salts}
        spreads = Spread.of_each(rows, [keys[found.salt] for _, found in group])
        yield from ((one, spread) for (one, _), spread in zip(group, spreads, strict=True))
