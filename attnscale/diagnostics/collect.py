"""The records of a step, from what the listeners of all layers hold in all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from attnscale.diagnostics.gather import KEPT, join_processes, processes
from attnscale.diagnostics.layer import LARGEST, SUMS, LayerListener, pack, unpack
from attnscale.diagnostics.pending import settle
from attnscale.diagnostics.records import Record
from attnscale.diagnostics.rows import BACKWARD, FORWARD


def collect(layers: Iterable[LayerListener], step: int) -> list[Record]:
    """One record per layer and head: all layers in one tensor, all processes in one collective."""
    layers = list(layers)
    settle(layer.pending for layer in layers)
    # Processes must agree on a shape without asking each other; one alone keeps what there is.
    sample = max(8, KEPT // processes()) if processes() > 1 else max(1, *(layer.width for layer in layers))
    heads = [(layer.name, head) for layer in layers for head in range(layer.heads)]  # none where it was not called
    return _records_of(step, heads, join_processes(pack(layers, sample)), sample)


def _records_of(step: int, heads: list[tuple[str, int]], flats: Tensor, sample: int) -> list[Record]:
    spread, scalars = unpack(flats, sample)
    named = list(zip((*FORWARD, *BACKWARD), spread.summaries(), strict=True))
    phases = named[: len(FORWARD)], named[len(FORWARD) :]
    records = []
    for index, ((layer, head), numbers) in enumerate(zip(heads, scalars.T.tolist(), strict=True)):
        forward, backward = (
            {name: summary for name, of_heads in phase if (summary := of_heads[index])} for phase in phases
        )
        found = _scalars_of(dict(zip((*SUMS, *LARGEST), numbers, strict=True)), bool(backward))
        records.append(Record(step, layer, head, forward, backward, found))
    return records


def _scalars_of(numbers: dict[str, float], answered: bool) -> dict[str, float]:
    """What a head has one of, from the sums that were kept."""
    spread_in, spread_out = numbers["angle_in"], numbers["angle_out"]
    ratio = spread_out / spread_in if spread_in > 0 else math.nan
    found = {} if math.isnan(ratio) else {"angle_ratio": ratio}
    if numbers["broken_row"] >= 0:
        found["broken_row"] = numbers["broken_row"]
    if answered:
        squares = [numbers[name] for name in ("query_gradient", "key_gradient", "value_gradient")]
        names = ("query_gradient", "key_gradient", "value_gradient", "output_gradient")
        found |= {name: math.sqrt(numbers[name]) for name in names}
        if numbers["output_gradient"] > 0:
            found["gain"] = math.sqrt(sum(squares) / numbers["output_gradient"])
        if numbers["mismatch"] >= 0:
            found["mismatch"] = numbers["mismatch"]
    return found
