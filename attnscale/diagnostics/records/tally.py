"""What the calls of one layer add up to: quantities of their rows, and numbers that a head has one of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attnscale._util.uncopied import Uncopied
from attnscale.diagnostics.records.spread import Spread, row_keys
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD

# One number per head: sums over calls, and for the last two the largest.
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient")
SUMS = ("angle_in", "angle_out", *GRADIENTS, "skipped_calls")
LARGEST = ("mismatch", "broken_row")


class Tally(Uncopied):
    """The sums of any number of calls, on the layer's device: they are read back once, for a report."""

    def __init__(self) -> None:
        self.forward: Spread | None = None
        self.backward: Spread | None = None
        self.heads, self.device = 0, torch.device("cpu")  # no heads: there was no call
        self._noted: dict[str, Tensor] = {}  # each [H]

    def add_forward(self, rows: Tensor, salt: int) -> None:
        """The quantities [Q, B, H, R] of a call in forward; the salt of its rows' keys is the call's own."""
        self.forward = _merged(self.forward, _spread_of(rows, salt))

    def add_backward(self, rows: Tensor, salt: int) -> None:
        self.backward = _merged(self.backward, _spread_of(rows, salt))

    def note(self, **numbers: Tensor) -> None:
        """Add what a head has one of, [H]."""
        for name, value in numbers.items():
            self.heads, self.device = value.shape[0], value.device
            join = torch.add if name in SUMS else torch.maximum
            self._noted[name] = join(self.scalar(name), value.to(torch.float32))

    def absorb(self, other: Tally) -> None:
        """Take over what another one holds; it is empty then."""
        self.forward, self.backward = _merged(self.forward, other.forward), _merged(self.backward, other.backward)
        self.note(**other._noted)
        other.forward, other.backward, other.heads, other._noted = None, None, 0, {}

    def scalar(self, name: str) -> Tensor:
        """A number that a head has one of, of all calls together, [H]."""
        if name in self._noted:
            return self._noted[name]
        return torch.full((self.heads,), 0.0 if name in SUMS else -1.0, device=self.device)

    @property
    def numbers(self) -> int:
        """How many numbers are held for the quantiles."""
        return sum(spread.sample.numel() for spread in (self.forward, self.backward) if spread is not None)

    @property
    def width(self) -> int:
        """How many rows are kept for the quantiles."""
        spreads = (self.forward, self.backward)
        return max((spread.keys.shape[0] for spread in spreads if spread is not None), default=0)

    def spreads(self) -> tuple[Spread, Spread]:
        """Of the quantities of forward and backward; empty ones where there was no call."""
        return self.forward or self._nothing(len(FORWARD)), self.backward or self._nothing(len(BACKWARD))

    def _nothing(self, quantities: int) -> Spread:
        row = torch.full((quantities, self.heads, 1), math.nan, device=self.device)
        return Spread.of(row, torch.zeros(1, dtype=torch.int64, device=self.device))


def _spread_of(rows: Tensor, salt: int) -> Spread:
    of_heads = rows.transpose(1, 2).flatten(2)  # [Q, H, B·R]
    return Spread.of(of_heads, row_keys(salt, of_heads.shape[-1], rows.device))


def _merged(one: Spread | None, other: Spread | None) -> Spread | None:
    if one is None or other is None:
        return other if one is None else one
    return one.merge(other)


def pack(tallies: Sequence[Tally], sample: int) -> list[Tensor]:
    """What each holds as a tensor [H, width(sample)] on the CPU, of a shape that does not depend on what it was."""
    by_device: dict[torch.device, list[Tally]] = {}
    for tally in tallies:
        by_device.setdefault(tally.device, []).append(tally)
    packed: dict[int, Tensor] = {}
    for group in by_device.values():
        phases = zip(*(tally.spreads() for tally in group), strict=True)
        rows = torch.cat([Spread.flat(spreads, sample) for spreads in phases])  # [Q, H, ·]
        scalars = torch.cat([tally.scalar(name) for name in (*SUMS, *LARGEST) for tally in group])
        whole = torch.cat([rows.movedim(1, 0).flatten(1), scalars.view(len(SUMS + LARGEST), -1).T], dim=1)
        parts = torch.split(whole.cpu(), [tally.heads for tally in group])  # the host waits once for each device
        packed |= zip(map(id, group), parts, strict=True)
    return [packed[id(tally)] for tally in tallies]


def width(sample: int) -> int:
    """How many numbers a packed head has."""
    return (len(FORWARD) + len(BACKWARD)) * (4 + sample) + len(SUMS) + len(LARGEST)


def unpack(packed: Tensor, sample: int) -> tuple[Tensor, Tensor]:
    """Flat spreads [P, Q, H, 4 + sample], and scalars [SUMS + LARGEST, H] of all, from [P, H, width(sample)]."""
    quantities = len(FORWARD) + len(BACKWARD)
    rows, sums, largest = torch.split(packed, [quantities * (4 + sample), len(SUMS), len(LARGEST)], dim=-1)
    flats = rows.reshape(*rows.shape[:2], quantities, 4 + sample).movedim(2, 1)
    return flats, torch.cat([sums.sum(0), largest.amax(0)], dim=-1).T
