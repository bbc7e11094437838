"""Number of tiles that an attention call runs in each loop phase, by visibility rule and length.

Mirrors the kernels (attnscale_kernels/tiles.py, and flash/mask_kernel.py for masks) for one head and equal numbers of
queries and keys: a program owns a block of rows, or of keys, and steps through tiles of the other.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from typing import NamedTuple

LENGTHS = (1024, 4096, 16384)
WINDOW = 1024  # visible keys of a row under "window", its own included
BLOCK = 512  # block size of the rule "block-sparse"
RULES = ("everything", "causal", "window", "bounds", "padding", "bool mask", "block-sparse", "bias")
MASKED = ("bool mask", "block-sparse", "bias")  # rules given as a mask


class Sequence(NamedTuple):
    """A sequence of `length` tokens. Row i sees the keys [start(i), stop(i)); both bounds are non-decreasing."""

    length: int
    window: int | None = None  # visible keys per row; None: unlimited
    document: int | None = None  # tokens per document; None: a single document
    keys: int | None = None  # keys without padding; None: all
    causal: bool = True

    def start(self, row: int) -> int:
        """First visible key of a row."""
        first = 0 if self.window is None else max(0, row + 1 - self.window)
        return first if self.document is None else max(first, row // self.document * self.document)

    def stop(self, row: int) -> int:
        """End of the visible keys of a row."""
        document = self.document or self.length
        last = row + 1 if self.causal else min(row // document * document + document, self.length)
        return last if self.keys is None else min(last, self.keys)

    @property
    def visible(self) -> int:
        """Number of visible scores."""
        return sum(max(0, self.stop(row) - self.start(row)) for row in range(self.length))


class Passes(NamedTuple):
    """Tiles of one head per loop phase, and the number of tiles with at least one visible score."""

    before: int
    hot: int
    after: int
    needed: int


def sequences(rule: str, length: int) -> tuple[Sequence, ...]:
    """Return the example sequences of a rule, such as two documents, or a padded and a full sequence.

    The block-sparse mask shows the diagonal blocks: each of its tiles is either fully visible or hidden.

    >>> sequences("padding", 1024)[1].keys
    512
    """
    return {
        "everything": (Sequence(length, causal=False),),
        "causal": (Sequence(length),),
        "window": (Sequence(length, window=WINDOW),),
        "bounds": (Sequence(length, document=length // 2),),
        "padding": (Sequence(length), Sequence(length, keys=length // 2)),
        "bool mask": (Sequence(length),),
        "block-sparse": (Sequence(length, document=BLOCK, causal=False),),
        "bias": (Sequence(length),),
    }[rule]


@functools.cache
def visible_scores(rule: str, length: int) -> int:
    """Return the number of visible scores of a call.

    >>> visible_scores("causal", 4)
    10
    """
    return sum(sequence.visible for sequence in sequences(rule, length))


@functools.cache
def passes(rule: str, length: int, tile: tuple[int, int], *, by_keys: bool = False, classified: bool = True) -> Passes:
    """Count the tiles [rows, keys] of a call; a program owns a block of rows or, `by_keys`, of keys.

    A kernel that has not `classified` the tiles of a mask visits all of them as edge tiles. Otherwise edge tiles come
    after the fully visible ones.

    >>> passes("causal", 1024, (128, 64))
    Passes(before=0, hot=56, after=16, needed=72)
    >>> passes("bool mask", 1024, (128, 64), classified=False)
    Passes(before=0, hot=0, after=128, needed=72)
    """
    classified = classified or rule not in MASKED
    block, step = tile[::-1] if by_keys else tile
    found = []
    for sequence in sequences(rule, length):
        walked = sequence if classified else Sequence(length, causal=False)
        for first in range(0, length, block):
            end = min(first + block, length)
            needed = sum(_phases(_range(sequence, first, end, by_keys), step, whole=True))
            before, hot, after = _phases(_range(walked, first, end, by_keys), step, whole=classified)
            found.append((0, hot, before + after, needed) if rule in MASKED else (before, hot, after, needed))
    return Passes(*(sum(column) for column in zip(*found, strict=True)))


def _range(sequence: Sequence, first: int, end: int, by_keys: bool) -> tuple[int, int, int, int]:
    """Return first, [clear_first, clear_end) and end of the keys seen by a block of rows; if `by_keys`, of rows."""
    if not by_keys:
        first_key, clear_first = sequence.start(first), sequence.start(end - 1)
        clear_end, end_key = sequence.stop(first), sequence.stop(end - 1)
        return first_key, clear_first, max(clear_first, clear_end), max(first_key, end_key)
    rows = range(sequence.length)
    first_row = bisect_right(rows, first, key=sequence.stop)  # first row with stop beyond the first key
    end_row = max(first_row, bisect_left(rows, end, key=sequence.start))
    clear_first = min(bisect_left(rows, end, key=sequence.stop), end_row)
    clear_end = min(max(clear_first, bisect_right(rows, first, key=sequence.start)), end_row)
    return first_row, clear_first, clear_end, end_row


def _phases(found: tuple[int, int, int, int], step: int, *, whole: bool) -> tuple[int, int, int]:
    """Return the tiles before, within and after the fully visible range; if unknown, all tiles come after."""
    first, clear_first, clear_end, end = found
    low = first // step * step
    clear_low = -(-clear_first // step) * step if whole else low
    clear_high = max(clear_end // step * step, clear_low) if whole else low
    return _tiles(low, min(clear_low, end), step), _tiles(clear_low, clear_high, step), _tiles(clear_high, end, step)


def _tiles(low: int, high: int, step: int) -> int:
    return max(0, -(-(high - low) // step))
