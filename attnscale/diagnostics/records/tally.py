"""Aggregates the measured calls of all layers and processes into the records of a step, in bounded memory.

Moments are exact. Quantiles are estimated from a uniform sample: every row has a pseudo-random key, and the sample
keeps the rows with the smallest keys. Samples can therefore be thinned and merged, and remain uniform samples.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed
from torch.nn.functional import pad

from attnscale._util import state
from attnscale._util.handles import Uncopied
from attnscale.diagnostics.delivery import Notices
from attnscale.diagnostics.records.record import Record, Summary
from attnscale.diagnostics.tracking import FAULT, ORDER, earliest
from attnscale.errors import BackendError
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD

# One number per head: SUMS are summed over calls, LARGEST are maxima.
GRADIENTS = ("query_gradient", "key_gradient", "value_gradient", "output_gradient")
SUMS = ("angle_in", "angle_out", "angle_calls", "value_squares", "value_numbers", *GRADIENTS, "skipped_calls")
LARGEST = ("mismatch",)
SCALARS = (*SUMS, *LARGEST, *FAULT)
# Rows per layer kept for the quantiles in one process. Mean and extremes cover all rows.
KEPT = 1024
# Rows per quantity and head sent for the quantiles by all processes together, and the minimum per process.
SENT_ROWS = 512
FEWEST_ROWS = 8
LEVELS = (0.1, 0.5, 0.9)
# Larger than any 32-bit key.
NO_KEY = 2**32
_BITS = NO_KEY - 1


class Spread(NamedTuple):
    """Distribution of Q quantities over rows: count, sum, minimum and maximum, each [Q, H], and a sample [Q, H, S].

    A row of the sample contains every quantity of every head, NaN if undefined. `keys` [S] are the keys of these rows.
    """

    number: Tensor
    total: Tensor
    least: Tensor
    largest: Tensor
    sample: Tensor
    keys: Tensor

    @classmethod
    def of(cls, rows: Tensor, keys: Tensor) -> Spread:
        """Build from rows [Q, H, N] with keys [N]. NaN marks rows that do not count."""
        counts = ~rows.isnan()
        if rows.shape[-1] > KEPT:
            # Rows without any value, such as padding, must not displace other rows.
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
        """Return a copy with at most `most` rows in the sample."""
        if self.keys.shape[0] <= most:
            return self
        keys, chosen = self.keys.topk(most, largest=False, sorted=False)
        return self._replace(sample=self.sample.index_select(-1, chosen), keys=keys)

    def merge(self, other: Spread) -> Spread:
        """Merge with the distribution of other rows, whose keys must differ."""
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
        """Pack moments and samples of all heads into one tensor [Q, H, 4 + sample], padded with NaN."""
        samples = [spread.thinned(sample).sample for spread in spreads]
        wide = [pad(x, (0, sample - x.shape[-1]), value=math.nan) if x.shape[-1] < sample else x for x in samples]
        moments = (torch.cat(parts, dim=1) for parts in zip(*(spread[:4] for spread in spreads), strict=True))
        return torch.cat([torch.stack(list(moments), dim=-1), torch.cat(wide, dim=1)], dim=-1)


class Tally(Uncopied):
    """Sums over the calls of a layer. They stay on the device and are read back once per report."""

    def __init__(self) -> None:
        self.forward: Spread | None = None
        self.backward: Spread | None = None
        self.heads, self.device = 0, torch.device("cpu")  # 0 heads: no call yet
        self._noted: dict[str, Tensor] = {}  # each [H]

    def add_forward(self, rows: Tensor, keys: Tensor, *, max_logit: Tensor | None = None) -> None:
        """Add the quantities [Q, B, H, R] of a forward call. `keys` [B·R] are its `row_keys`.

        `max_logit` [H] is the largest logit over all rows of the call, including those not sampled.
        """
        spread = _spread_of(rows, keys)
        if max_logit is not None:
            largest = spread.largest[FORWARD.index("max_logit")]
            torch.maximum(largest, max_logit, out=largest)
        self.forward = _merged(self.forward, spread)

    def add_backward(self, rows: Tensor, keys: Tensor) -> None:
        """Add the quantities [Q, B, H, R] of a backward call, with the keys of its forward call."""
        self.backward = _merged(self.backward, _spread_of(rows, keys))

    def note(self, **numbers: Tensor) -> None:
        """Add scalars, one number per head, each [H]."""
        for name, value in numbers.items():
            self.heads, self.device = value.shape[0], value.device
            value = value.to(torch.float32)
            if name in self._noted:
                join = torch.add if name in SUMS else torch.maximum
                value = join(self._noted[name], value)
            self._noted[name] = value

    def take_faults(self, faults: Tensor) -> None:
        """Set the first fault of each head, [FAULT, H]."""
        self.heads, self.device = faults.shape[1], faults.device
        self._noted |= dict(zip(FAULT, faults, strict=True))

    def absorb(self, other: Tally) -> None:
        """Move the content of another tally into this one."""
        self.forward, self.backward = _merged(self.forward, other.forward), _merged(self.backward, other.backward)
        self.note(**other._noted)
        other.forward, other.backward, other.heads, other._noted = None, None, 0, {}

    def scalar(self, name: str) -> Tensor:
        """Return a scalar per head over all calls, [H]."""
        if name in self._noted:
            return self._noted[name]
        nothing = math.inf if name in FAULT else 0.0 if name in SUMS else -1.0
        return torch.full((self.heads,), nothing, device=self.device)

    @property
    def numbers(self) -> int:
        """Number of values kept for the quantiles."""
        return sum(spread.sample.numel() for spread in (self.forward, self.backward) if spread is not None)

    @property
    def width(self) -> int:
        """Number of rows kept for the quantiles."""
        spreads = (self.forward, self.backward)
        return max((spread.keys.shape[0] for spread in spreads if spread is not None), default=0)

    def spreads(self) -> tuple[Spread, Spread]:
        """Return the distributions of the forward and backward quantities, empty if there was no call."""
        return self.forward or self._nothing(len(FORWARD)), self.backward or self._nothing(len(BACKWARD))

    def _nothing(self, quantities: int) -> Spread:
        row = torch.full((quantities, self.heads, 1), math.nan, device=self.device)
        return Spread.of(row, torch.zeros(1, dtype=torch.int64, device=self.device))


def _spread_of(rows: Tensor, keys: Tensor) -> Spread:
    return Spread.of(rows.transpose(1, 2).flatten(2), keys)  # [Q, H, B·R]


def _merged(one: Spread | None, other: Spread | None) -> Spread | None:
    if one is None or other is None:
        return other if one is None else one
    return one.merge(other)


def pack(tallies: Sequence[Tally], sample: int) -> list[Tensor]:
    """Pack each tally into a tensor [H, ·] on the CPU whose width does not depend on the number of rows."""
    by_device: dict[torch.device, list[Tally]] = {}
    for tally in tallies:
        by_device.setdefault(tally.device, []).append(tally)
    packed: dict[int, Tensor] = {}
    for group in by_device.values():
        phases = zip(*(tally.spreads() for tally in group), strict=True)
        rows = torch.cat([Spread.flat(spreads, sample) for spreads in phases])  # [Q, H, ·]
        scalars = torch.cat([tally.scalar(name) for name in SCALARS for tally in group])
        whole = torch.cat([rows.movedim(1, 0).flatten(1), scalars.view(len(SCALARS), -1).T], dim=1)
        parts = torch.split(whole.cpu(), [tally.heads for tally in group])  # one synchronisation per device
        packed |= zip(map(id, group), parts, strict=True)
    return [packed[id(tally)] for tally in tallies]


def unpack(packed: Tensor, sample: int) -> tuple[Tensor, Tensor]:
    """Unpack tensors [P, H, ·] into flat spreads [P, Q, H, 4 + sample] and merged scalars [SCALARS, H]."""
    quantities = len(FORWARD) + len(BACKWARD)
    sizes = [quantities * (4 + sample), len(SUMS), len(LARGEST), len(FAULT)]
    rows, sums, largest, faults = torch.split(packed, sizes, dim=-1)
    flats = rows.reshape(*rows.shape[:2], quantities, 4 + sample).movedim(2, 1)
    return flats, torch.cat([sums.sum(0).T, largest.amax(0).T, earliest(faults.mT)])


def row_keys(salt: int, rows: int, device: torch.device) -> Tensor:
    """Return pseudo-random keys [rows] for the rows of a call, computed on the device from the call's salt."""
    first, second = salt & _BITS, salt >> 32 & _BITS
    mixed = _mix(torch.arange(rows, dtype=torch.int64, device=device).bitwise_xor_(first))
    return _mix(mixed.add_(second).bitwise_and_(_BITS))


def salt_of(*numbers: int) -> int:
    """Return a 64-bit hash of the numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")


def _mix(x: Tensor) -> Tensor:
    """Apply the 32-bit hash lowbias32 in place, a bijection."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(_BITS)
    return x.bitwise_xor_(x >> 16)


def summaries(flats: Tensor) -> list[list[Summary | None]]:
    """Merge the flat spreads [P, Q, H, 4 + sample] of all processes into one summary per quantity and head.

    If processes hold different numbers of rows, their sampled rows are weighted accordingly. None without rows.
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
    """Return the percentiles 10, 50 and 90 [Q, H, 3] of samples [P, Q, H, S] from `numbers` [P, Q, H] rows.

    Interpolated; equal to `torch.quantile` for equal weights. NaN is ignored.
    """
    known = ~samples.isnan()
    ordered, order = samples.movedim(0, 2).flatten(2).sort(dim=-1)  # NaN last
    last = known.sum((0, 3)).sub_(1).clamp_(min=0)[..., None]
    share = torch.where(known, (numbers / known.sum(-1))[..., None], 0.0).to(torch.float64)
    weight = share.movedim(0, 2).flatten(2).gather(-1, order)
    # A sample lies in the middle of its weight interval; the first sample is at 0.
    places = weight.cumsum(-1) - weight / 2 - weight[..., :1] / 2
    place = places.gather(-1, last) * torch.tensor(LEVELS, dtype=torch.float64, device=samples.device)
    below = (torch.searchsorted(places, place, right=True) - 1).clamp_(min=0).minimum(last)
    above = torch.minimum(below + 1, last)
    left, right = places.gather(-1, below), places.gather(-1, above)
    part = torch.where(right > left, (place - left) / (right - left), 0.0)
    low, high = ordered.gather(-1, below), ordered.gather(-1, above)
    return torch.where(low == high, low, torch.lerp(low.to(torch.float64), high.to(torch.float64), part))


class TalliedLayer(Protocol):
    """A layer with a tally of its training calls, or of its evaluation calls if there was no training call."""

    name: str
    training: Tally

    def tally(self) -> Tally: ...


class Part(NamedTuple):
    """The packed tallies [P, H, ·] of a layer from P processes, all in training or all in evaluation.

    `first` is the index of the first head if the heads of the layer are spread over processes.
    """

    layer: str
    training: bool
    rows: Tensor
    first: int = 0


class Processes(Uncopied):
    """A process group in which every process has a monitor.

    `parts` maps layers of this process to the index of its share of their heads, 0 for all other layers. Processes with
    the same share hold different rows, which are merged. Processes with different shares hold different heads of the
    same rows.
    """

    def __init__(
        self, parts: Mapping[str, int], group: distributed.ProcessGroup | None, notices: Notices, timeout: float
    ) -> None:
        self._parts = dict(parts)
        self.group = group
        self._notices = notices
        self._timeout = timeout

    @property
    def number(self) -> int:
        """Number of processes."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.number == 1 else distributed.get_rank(self.group)

    def collect(self, layers: Iterable[TalliedLayer], step: int, steps: int = 1) -> list[Record]:
        """Return one record per layer and head, merged over all processes. `steps` is their number since the last."""
        sample = max(FEWEST_ROWS, SENT_ROWS // self.number)  # the same in all processes
        here: dict[str, Part] = {}
        layers = list(layers)
        try:
            tallies = [(layer, tally) for layer in layers if (tally := layer.tally()).heads]
            if self.number == 1:
                sample = max([1, *(tally.width for _, tally in tallies)])
            packed = pack([tally for _, tally in tallies], sample)
            for (layer, tally), rows in zip(tallies, packed, strict=True):
                first = self._parts.get(layer.name, 0) * rows.shape[0]
                here[layer.name] = Part(layer.name, tally is layer.training, rows[None], first)
        except Exception as error:  # still join the collective: the other processes wait for it
            self._notices.add_error("a report failed and was dropped", error)
        names = [layer.name for layer in layers]
        parts = list(here.values()) if self.number == 1 else self._join(step, names, here)
        return list(_records_of(step, steps, parts, sample))

    def _join(self, step: int, own: list[str], here: dict[str, Part]) -> list[Part]:
        """Gather the parts of all processes in one collective. Training calls take precedence over evaluation calls."""
        self._wait(step)
        messages: list[tuple[int, list[str], dict[str, Part]]] = [(0, [], {})] * self.number
        # Pickling a view would send its whole storage.
        sent = {name: part._replace(rows=part.rows.clone()) for name, part in here.items()}
        distributed.all_gather_object(messages, (step, own, sent), group=self.group)
        steps, names, parts = zip(*messages, strict=True)
        if len(set(steps)) > 1:
            self._warn("steps", f"the processes are at different steps ({', '.join(map(str, steps))})")
            return list(here.values())
        found: list[Part] = []
        for name in dict.fromkeys(name for of_process in names for name in of_process):
            heads = [of_process[name].rows.shape[1] if name in of_process else 0 for of_process in parts]
            called = [of_process[name] for of_process in parts if name in of_process]
            if len(set(heads) - {0}) > 1:
                self._warn(
                    "heads", f"{name} has a different number of heads per process ({', '.join(map(str, heads))})"
                )
                found += [here[name]] if name in here else []
                continue
            training = any(part.training for part in called)
            chosen = [part for part in called if part.training == training]
            for first in sorted({part.first for part in chosen}):
                rows = torch.cat([part.rows for part in chosen if part.first == first])
                found.append(Part(name, training, rows, first))
        return found

    def _wait(self, step: int) -> None:
        """Wait until all processes report. A collective alone would wait for its own time-out, half an hour."""
        ranks = distributed.get_process_group_ranks(self.group or distributed.group.WORLD)
        group = "-".join(map(str, (ranks[0], ranks[-1], len(ranks))))
        store, meeting = distributed.distributed_c10d._get_default_store(), state.MEETINGS[group]

        def key(meeting: int, rank: int) -> str:
            return f"attnscale/monitor/{group}/{meeting}/{rank}"

        here = distributed.get_rank()
        store.set(key(meeting, here), str(step))
        try:
            store.wait([key(meeting, rank) for rank in ranks], timedelta(seconds=self._timeout))
        except Exception as error:
            late = ", ".join(str(rank) for rank in ranks if not store.check([key(meeting, rank)]))
            raise BackendError(
                f"monitor.step({step}) waited {self._timeout:g} s for rank {late}: every process of the monitor's "
                "process_group must call step() at the same steps"
            ) from error
        if meeting:  # everyone has read the keys of the meeting before
            store.delete_key(key(meeting - 1, here))
        state.MEETINGS[group] += 1

    def _warn(self, kind: str, reason: str) -> None:
        self._notices.add(
            kind,
            f"the reports of {self.number} processes cannot be merged: {reason}. Each process reports on its own. "
            "Pass the monitor a process_group of the processes that hold the same layers",
        )


def _records_of(step: int, steps: int, parts: Iterable[Part], sample: int) -> Iterator[Record]:
    """Yield the records of parts. Adjacent parts from the same number of processes are summarised together."""
    for _, run in itertools.groupby(parts, lambda part: len(part.rows)):
        together = list(run)
        flats, scalars = unpack(torch.cat([part.rows for part in together], dim=1), sample)
        named = list(zip((*FORWARD, *BACKWARD), summaries(flats), strict=True))
        phases = named[: len(FORWARD)], named[len(FORWARD) :]
        places = [(part, head) for part in together for head in range(part.rows.shape[1])]
        for column, ((part, head), numbers) in enumerate(zip(places, scalars.T.tolist(), strict=True)):
            forward, backward = (
                {name: summary for name, of_heads in phase if (summary := of_heads[column])} for phase in phases
            )
            of_head = _scalars_of(dict(zip(SCALARS, numbers, strict=True)), bool(backward))
            if "broken_step" in of_head:
                of_head["broken_step"] += step - steps + 1
            mode = "training" if part.training else "evaluation"
            yield Record(step, part.layer, part.first + head, forward, backward, of_head, mode)


def _scalars_of(numbers: dict[str, float], answered: bool) -> dict[str, float]:
    """Compute the scalars of a head's record from its sums over calls."""
    found: dict[str, float] = {}
    if numbers["angle_calls"]:
        found["token_angle"] = numbers["angle_in"] / numbers["angle_calls"]
        if numbers["angle_in"] > 0:
            found["angle_ratio"] = numbers["angle_out"] / numbers["angle_in"]
    if numbers["value_numbers"]:
        found["value_size"] = math.sqrt(numbers["value_squares"] / numbers["value_numbers"])
    least = {"skipped_calls": 1}
    if answered:
        found |= {name: math.sqrt(numbers[name]) for name in GRADIENTS}
        query, key, value, arrived = (numbers[name] for name in GRADIENTS)
        if arrived > 0:
            found["gain"] = math.sqrt((query + key + value) / arrived)
            found["score_gain"] = math.sqrt((query + key) / arrived)
        least["mismatch"] = 0
    if math.isfinite(numbers["fault"]):
        order, origin = divmod(int(numbers["fault"]), ORDER)
        found |= {"broken_row": numbers["fault_row"], "broken_call": order, "broken_origin": origin}
        found["broken_step"] = numbers["fault_offset"]
    return found | {name: numbers[name] for name in least if numbers[name] >= least[name]}
