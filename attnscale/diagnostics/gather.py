"""Quantities over rows, kept small while they come in, and joined across processes by one collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from attnscale.diagnostics.records import Summary

# Rows kept per quantity and head for the quantiles, over all processes; mean and extremes are of all rows.
KEPT = 512


class Spread(NamedTuple):
    """Quantities over rows: how many, their sum, least and largest, each [Q, H], and a sample of them [Q, H, S]."""

    number: Tensor
    total: Tensor
    least: Tensor
    largest: Tensor
    sample: Tensor  # NaN where there is none

    @classmethod
    def of(cls, rows: Tensor) -> Spread:
        """Of rows [Q, H, N], NaN where a row does not count."""
        counts = ~rows.isnan()
        return cls(
            counts.sum(-1).to(rows.dtype),
            torch.where(counts, rows, 0.0).sum(-1),
            torch.where(counts, rows, math.inf).amin(-1),
            torch.where(counts, rows, -math.inf).amax(-1),
            _thin(rows, KEPT),
        )

    def merge(self, other: Spread) -> Spread:
        """Of the rows of both."""
        return Spread(
            self.number + other.number,
            self.total + other.total,
            torch.minimum(self.least, other.least),
            torch.maximum(self.largest, other.largest),
            _thin(torch.cat([self.sample, other.sample], dim=-1), 4 * KEPT),
        )

    @classmethod
    def beside(cls, spreads: Sequence[Spread]) -> Spread:
        """Of the heads of all, one behind the other."""
        width = max(spread.sample.shape[-1] for spread in spreads)
        alike = [spread._replace(sample=_wide(spread.sample, width)) for spread in spreads]
        return cls(*(torch.cat(parts, dim=1) for parts in zip(*alike, strict=True)))

    def flat(self, sample: int) -> Tensor:
        """As one tensor [Q, H, 4 + sample], the same shape whatever has come in."""
        return torch.cat([torch.stack(self[:4], dim=-1), _wide(_thin(self.sample, sample), sample)], dim=-1)

    @classmethod
    def join(cls, flats: Tensor) -> Spread:
        """Of all processes, from what each has made flat, [P, Q, H, 4 + sample]."""
        count, total, least, largest = flats[..., :4].unbind(-1)
        sample = flats[..., 4:].permute(1, 2, 0, 3).flatten(2)
        return cls(count.sum(0), total.sum(0), least.amin(0), largest.amax(0), sample)

    def summaries(self) -> list[list[Summary | None]]:
        """One per quantity and head; None where there were no rows."""
        quantiles = _quantiles(self.sample).tolist()
        moments = torch.stack(self[:4], dim=-1).tolist()
        return [
            [
                Summary(total / count, p10, p50, p90, least, largest, int(count)) if count else None
                for (count, total, least, largest), (p10, p50, p90) in zip(heads, head_marks, strict=True)
            ]
            for heads, head_marks in zip(moments, quantiles, strict=True)
        ]


def _quantiles(sample: Tensor) -> Tensor:
    """10, 50 and 90 per cent of each row [..., S] as [..., 3], interpolated; NaN does not count."""
    if not sample.shape[-1]:
        return sample.new_full((*sample.shape[:-1], 3), math.nan)
    ordered = sample.sort(dim=-1).values  # NaN last
    last = (~sample.isnan()).sum(-1, keepdim=True).sub(1).clamp(min=0)
    place = last * torch.tensor([0.1, 0.5, 0.9], dtype=sample.dtype)
    below = place.floor()
    low, high = (ordered.gather(-1, at.to(torch.int64)) for at in (below, torch.minimum(below + 1, last)))
    return torch.lerp(low, high, place - below)


def processes() -> int:
    """How many there are."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_writer() -> bool:
    """Whether this is the one that writes."""
    return processes() == 1 or distributed.get_rank() == 0


def join_processes(flat: Tensor) -> Tensor:
    """What all processes hold, [P, ...]; the tensor must have the same shape in each."""
    if processes() == 1:
        return flat[None]
    here = flat.to("cuda") if distributed.get_backend() == "nccl" else flat
    everywhere = here.new_empty((processes(), *here.shape))
    distributed.all_gather_into_tensor(everywhere.view(-1), here.contiguous().view(-1))
    return everywhere.to(flat.device)


def _wide(rows: Tensor, width: int) -> Tensor:
    """As many rows [..., N], with NaN for those that are missing."""
    missing = width - rows.shape[-1]
    return pad(rows, (0, missing), value=math.nan) if missing else rows


def _thin(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows [..., N], evenly."""
    return rows[..., :: max(1, -(-rows.shape[-1] // most))]
