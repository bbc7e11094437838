"""The records of a step, from the tallies of all layers in all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from attnscale.diagnostics.alerts import Notices
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.records.distributed import Part, Processes
from attnscale.diagnostics.records.record import Record
from attnscale.diagnostics.records.spread import summaries
from attnscale.diagnostics.records.tally import GRADIENTS, LARGEST, SUMS, pack, unpack, width
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD


def collect(layers: Iterable[LayerListener], step: int, processes: Processes, notices: Notices) -> list[Record]:
    """One record per layer and head: all layers in one tensor, all processes in one collective."""
    alone = processes.number == 1
    here: dict[str, Part] = {}
    sample = processes.sample  # the same in all processes
    try:
        tallies = [(layer, tally) for layer in layers if (tally := layer.tally()).heads]
        if alone:
            sample = max([1, *(tally.width for _, tally in tallies)])
        packed = pack([tally for _, tally in tallies], sample)
        here = {
            layer.name: Part(layer.name, tally is layer.training, rows[None])
            for (layer, tally), rows in zip(tallies, packed, strict=True)
        }
    except Exception as error:  # the other processes wait for this one, and must not wait forever
        notices.add_error("a report failed and is dropped", error)
    parts = processes.join(step, here, width(sample))
    return [record for part in parts for record in _records_of(step, part, sample)]


def _records_of(step: int, part: Part, sample: int) -> Iterator[Record]:
    flats, scalars = unpack(part.rows, sample)
    named = list(zip((*FORWARD, *BACKWARD), summaries(flats), strict=True))
    phases = named[: len(FORWARD)], named[len(FORWARD) :]
    for head, numbers in enumerate(scalars.T.tolist()):
        forward, backward = (
            {name: summary for name, of_heads in phase if (summary := of_heads[head])} for phase in phases
        )
        of_head = _scalars_of(dict(zip((*SUMS, *LARGEST), numbers, strict=True)), bool(backward))
        mode = "training" if part.training else "evaluation"
        yield Record(step, part.layer, part.first + head, forward, backward, of_head, mode)


def _scalars_of(numbers: dict[str, float], answered: bool) -> dict[str, float]:
    """The scalars of a head's record, from its sums over calls."""
    ratio = numbers["angle_out"] / numbers["angle_in"] if numbers["angle_in"] > 0 else math.nan
    found = {} if math.isnan(ratio) else {"angle_ratio": ratio}
    least = {"broken_row": 0, "skipped_calls": 1}
    if answered:
        found |= {name: math.sqrt(numbers[name]) for name in GRADIENTS}
        *passed, arrived = (numbers[name] for name in GRADIENTS)
        if arrived > 0:
            found["gain"] = math.sqrt(sum(passed) / arrived)
        least["mismatch"] = 0
    return found | {name: numbers[name] for name in least if numbers[name] >= least[name]}
