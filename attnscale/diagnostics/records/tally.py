"""What the calls of one layer add up to, in bounded memory: the spread of quantities over rows, and numbers per head.

Moments are exact; quantiles are those of a uniform sample. Every row has a random key, and a sample holds the rows with
the smallest keys. So a sample of a sample is a sample of the whole, and samples of two parts, thinned together, are a
sample of both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscale._util.handles import Uncopied
from attnscale.diagnostics.records.record import Summary
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD

# One number per head: sums over calls, and for the last two the largest.
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient")
SUMS = ("angle_in", "angle_out", *GRADIENTS, "skipped_calls")
LARGEST = ("mismatch", "broken_row")
# Rows kept per layer for the quantiles, in one process; mean and extremes are of all rows.
KEPT = 1024
LEVELS = (0.1, 0.5, 0.9)
# Keys are 32 bits wide; this one is larger than any of them.
NO_KEY = 2**32
_BITS = NO_KEY - 1


class Spread(NamedTuple):
    """Quantities over rows: how many, their sum, least and largest, each [Q, H], and a sample of them [Q, H, S].

    A row of the sample holds every quantity of every head, NaN where it has none; `keys` [S] are those of its rows.
    """

    number: Tensor
    total: Tensor
    least: Tensor
    largest: Tensor
    sample: Tensor
    keys: Tensor

    @classmethod
    def of(cls, rows: Tensor, keys: Tensor) -> Spread:
        """Of rows [Q, H, N] with keys [N], NaN where a row does not count."""
        counts = ~rows.isnan()
        if rows.shape[-1] > KEPT:
            # Rows that count nowhere, such as padding, must not take the place of others.
            keys = keys.masked_fill(~counts.any(0).any(0), NO_KEY)
        return cls(
            counts.sum(-1).to(rows.dtype),
            torch.where(counts, rows, 0.0).sum(-1),
            torch.where(counts, rows, math.inf).amin(-1),
            torch.where(counts, rows, -math.inf).amax(-1),
            rows,
            keys,
        ).thinned(KEPT)

    def thinned(self, most: int) -> Spread:
        """The same with at most so many rows in its sample."""
        if self.keys.shape[0] <= most:
            return self
        keys, chosen = self.keys.topk(most, largest=False, sorted=False)
        return self._replace(sample=self.sample.index_select(-1, chosen), keys=keys)

    def merge(self, other: Spread) -> Spread:
        """Of the rows of both, which must have been given different keys."""
        return Spread(
            self.number + other.number,
            self.total + other.total,
            torch.minimum(self.least, other.least),
            torch.maximum(self.largest, other.largest),
            torch.cat([self.sample, other.sample], dim=-1),
            torch.cat([self.keys, other.keys]),
        ).thinned(KEPT)

    @staticmethod
    def flat(spreads: Sequence[Spread], sample: int) -> Tensor:
        """Moments and samples of all heads as one tensor [Q, H, 4 + sample]; samples are padded with NaN."""
        samples = [spread.thinned(sample).sample for spread in spreads]
        wide = [pad(x, (0, sample - x.shape[-1]), value=math.nan) if x.shape[-1] < sample else x for x in samples]
        moments = (torch.cat(parts, dim=1) for parts in zip(*(spread[:4] for spread in spreads), strict=True))
        return torch.cat([torch.stack(list(moments), dim=-1), torch.cat(wide, dim=1)], dim=-1)


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
    """What each holds as a tensor [H, ·] on the CPU, of a shape that does not depend on what it was."""
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


def unpack(packed: Tensor, sample: int) -> tuple[Tensor, Tensor]:
    """Flat spreads [P, Q, H, 4 + sample], and scalars [SUMS + LARGEST, H] of all, from packed tensors [P, H, ·]."""
    quantities = len(FORWARD) + len(BACKWARD)
    rows, sums, largest = torch.split(packed, [quantities * (4 + sample), len(SUMS), len(LARGEST)], dim=-1)
    flats = rows.reshape(*rows.shape[:2], quantities, 4 + sample).movedim(2, 1)
    return flats, torch.cat([sums.sum(0), largest.amax(0)], dim=-1).T


def row_keys(salt: int, rows: int, device: torch.device) -> Tensor:
    """Pseudo-random keys [rows] for the rows of a call, determined by the salt and computed on the device."""
    first, second = salt & _BITS, salt >> 32 & _BITS
    mixed = _mix(torch.arange(rows, dtype=torch.int64, device=device).bitwise_xor_(first))
    return _mix(mixed.add_(second).bitwise_and_(_BITS))


def salt_of(*numbers: int) -> int:
    """A 64-bit hash of the numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, in place, in which every bit of the result depends on every bit of x (lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(_BITS)
    return x.bitwise_xor_(x >> 16)


def summaries(flats: Tensor) -> list[list[Summary | None]]:
    """One per quantity and head, of all processes, from the flat spreads [P, Q, H, 4 + sample] of each, on the CPU.

    Where processes hold different numbers of rows, a sampled row stands for as many as its process has per sampled row.
    None where there were no rows.
    """
    count, total, least, largest = flats[..., :4].unbind(-1)  # each [P, Q, H]
    moments = torch.stack([count.sum(0), total.sum(0), least.amin(0), largest.amax(0)], dim=-1).tolist()
    marks = _quantiles(flats[..., 4:], count).tolist()
    return [
        [
            Summary(total / count, p10, p50, p90, least, largest, int(count)) if count else None
            for (count, total, least, largest), (p10, p50, p90) in zip(*of_heads, strict=True)
        ]
        for of_heads in zip(moments, marks, strict=True)
    ]


def _quantiles(samples: Tensor, numbers: Tensor) -> Tensor:
    """10, 50 and 90 per cent of the rows that samples [P, Q, H, S], of numbers [P, Q, H] of rows, stand for: [Q, H, 3].

    Interpolated; with equal weights the same as `torch.quantile`. NaN does not count.
    """
    known = ~samples.isnan()
    ordered, order = samples.movedim(0, 2).flatten(2).sort(dim=-1)  # NaN last
    last = known.sum((0, 3)).sub_(1).clamp_(min=0)[..., None]
    share = torch.where(known, (numbers / known.sum(-1))[..., None], 0.0).to(torch.float64)
    weight = share.movedim(0, 2).flatten(2).gather(-1, order)
    # A row lies in the middle of what it stands for; the first at 0.
    places = weight.cumsum(-1) - weight / 2 - weight[..., :1] / 2
    place = places.gather(-1, last) * torch.tensor(LEVELS, dtype=torch.float64, device=samples.device)
    below = (torch.searchsorted(places, place, right=True) - 1).clamp_(min=0).minimum(last)
    above = torch.minimum(below + 1, last)
    left, right = places.gather(-1, below), places.gather(-1, above)
    part = torch.where(right > left, (place - left) / (right - left), 0.0)
    low, high = ordered.gather(-1, below), ordered.gather(-1, above)
    return torch.where(low == high, low, torch.lerp(low.to(torch.float64), high.to(torch.float64), part))
