"""The records of a step, from the tallies of all layers in all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.notices import Notices
from attnscale.diagnostics.records.distributed import Part, Processes
from attnscale.diagnostics.records.record import Record
from attnscale.diagnostics.records.spread import summaries
from attnscale.diagnostics.records.tally import LARGEST, SUMS, pack, unpack, width
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD


def collect(layers: Iterable[LayerListener], step: int, processes: Processes, notices: Notices) -> list[Record]:
    """One record per layer and head: all layers in one tensor, all processes in one collective."""
    alone = processes.number == 1
    here: dict[str, Part] = {}
    sample = processes.sample  # the same in all processes
    try:
        tallies = [(layer, tally) for layer in layers if not (tally := layer.tally()).is_empty]
        if alone:
            sample = max([1, *(tally.width for _, tally in tallies)])
        packed = pack([tally for _, tally in tallies], sample)
        here = {
            layer.name: Part(layer.name, tally is layer.training, rows[None])
            for (layer, tally), rows in zip(tallies, packed, strict=True)
        }
    except Exception as error:  # the other processes wait for this one, and must not wait forever
        notices.add_error("a report failed and is dropped", error)
    return _records_of(step, processes.join(step, here, width(sample)), sample)


def _records_of(step: int, parts: Sequence[Part], sample: int) -> list[Record]:
    alike: dict[int, list[Part]] = {}  # by the number of processes that report them: few operators for many layers
    for part in parts:
        alike.setdefault(part.rows.shape[0], []).append(part)
    found: dict[tuple[str, int], list[Record]] = {}
    for group in alike.values():
        flats, scalars = unpack(torch.cat([part.rows for part in group], dim=1), sample)
        named = list(zip((*FORWARD, *BACKWARD), summaries(flats), strict=True))
        phases = named[: len(FORWARD)], named[len(FORWARD) :]
        heads = [(part, head) for part in group for head in range(part.rows.shape[1])]
        for index, ((part, head), numbers) in enumerate(zip(heads, scalars.T.tolist(), strict=True)):
            forward, backward = (
                {name: summary for name, of_heads in phase if (summary := of_heads[index])} for phase in phases
            )
            of_head = _scalars_of(dict(zip((*SUMS, *LARGEST), numbers, strict=True)), bool(backward))
            mode = "training" if part.training else "evaluation"
            record = Record(step, part.layer, part.first + head, forward, backward, of_head, mode)
            found.setdefault((part.layer, part.first), []).append(record)
    return [record for part in parts for record in found[part.layer, part.first]]


def _scalars_of(numbers: dict[str, float], answered: bool) -> dict[str, float]:
    """The scalars of a head's record, from its sums over calls."""
    spread_in, spread_out = numbers["angle_in"], numbers["angle_out"]
    ratio = spread_out / spread_in if spread_in > 0 else math.nan
    found = {} if math.isnan(ratio) else {"angle_ratio": ratio}
    if numbers["broken_row"] >= 0:
        found["broken_row"] = numbers["broken_row"]
    if numbers["skipped_calls"] > 0:
        found["skipped_calls"] = numbers["skipped_calls"]
    if answered:
        squares = [numbers[name] for name in ("query_gradient", "key_gradient", "value_gradient")]
        names = ("query_gradient", "key_gradient", "value_gradient", "output_gradient")
        found |= {name: math.sqrt(numbers[name]) for name in names}
        if numbers["output_gradient"] > 0:
            found["gain"] = math.sqrt(sum(squares) / numbers["output_gradient"])
        if numbers["mismatch"] >= 0:
            found["mismatch"] = numbers["mismatch"]
    return found
