"""The records of a step, from the tallies of all layers in all processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from attnscale._util.handles import Uncopied
from attnscale.diagnostics.alerts import Notices
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.records.record import Record
from attnscale.diagnostics.records.tally import GRADIENTS, LARGEST, SUMS, pack, summaries, unpack
from attnscale.errors import ArgumentError
from attnscale.statistics.rows.quantities import BACKWARD, FORWARD

# Rows per quantity and head that all processes together send for the quantiles, and the fewest of one process.
SENT_ROWS = 512
FEWEST_ROWS = 8


class Part(NamedTuple):
    """The packed tallies of a layer from P processes, [P, H, ·], of its calls in training or in evaluation.

    Its heads are those from `first` on, where processes have different heads of the layer.
    """

    layer: str
    training: bool
    rows: Tensor
    first: int = 0


class Processes(Uncopied):
    """A process group, in which every process has a monitor, here with layers of these names.

    `names` maps each layer to the part of its heads that this process has, counted from 0. Processes with the same part
    have different rows, which are added; those with different parts have different heads of the same rows.
    """

    def __init__(self, names: Mapping[str, int], group: distributed.ProcessGroup | None, notices: Notices) -> None:
        self._names = dict(names)
        self._group = group
        self._notices = notices

    @property
    def number(self) -> int:
        """How many processes there are."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return 0 if self.number == 1 else distributed.get_rank(self._group)

    def collect(self, layers: Iterable[LayerListener], step: int) -> list[Record]:
        """One record per layer and head, of all processes."""
        sample = max(FEWEST_ROWS, SENT_ROWS // self.number)  # the same in all processes
        here: dict[str, Part] = {}
        try:
            tallies = [(layer, tally) for layer in layers if (tally := layer.tally()).heads]
            if self.number == 1:
                sample = max([1, *(tally.width for _, tally in tallies)])
            packed = pack([tally for _, tally in tallies], sample)
            for (layer, tally), rows in zip(tallies, packed, strict=True):
                first = self._names[layer.name] * rows.shape[0]
                here[layer.name] = Part(layer.name, tally is layer.training, rows[None], first)
        except Exception as error:  # the other processes wait for this one, and must not wait forever
            self._notices.add_error("a report failed and is dropped", error)
        parts = list(here.values()) if self.number == 1 else self._join(step, here)
        return [record for part in parts for record in _records_of(step, part, sample)]

    def _join(self, step: int, here: dict[str, Part]) -> list[Part]:
        """The parts of all processes, in one collective; a layer from those that trained it, or else evaluated it."""
        messages: list[tuple[int, list[str], dict[str, Part]]] = [(0, [], {})] * self.number
        sent = {name: part._replace(rows=part.rows.clone()) for name, part in here.items()}  # a view is sent whole
        distributed.all_gather_object(messages, (step, list(self._names), sent), group=self._group)
        steps, names, parts = zip(*messages, strict=True)
        if len(set(steps)) > 1:
            self._warn("steps", f"they are at the steps {', '.join(map(str, steps))}")
            return list(here.values())
        found: list[Part] = []
        for name in dict.fromkeys(name for of_process in names for name in of_process):
            heads = [of_process[name].rows.shape[1] if name in of_process else 0 for of_process in parts]
            called = [of_process[name] for of_process in parts if name in of_process]
            if len(set(heads) - {0}) > 1:
                self._warn("heads", f"{name} has {', '.join(map(str, heads))} heads there")
                found += [here[name]] if name in here else []
                continue
            training = any(part.training for part in called)
            chosen = [part for part in called if part.training == training]
            for first in sorted({part.first for part in chosen}):
                rows = torch.cat([part.rows for part in chosen if part.first == first])
                found.append(Part(name, training, rows, first))
        return found

    def _warn(self, kind: str, reason: str) -> None:
        self._notices.add(
            kind,
            f"the reports of {self.number} processes cannot be joined: {reason}; each goes on with its own. "
            "Give the monitor a process_group of those that hold the same layers",
        )


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


def refuse_unsaid_heads(model: nn.Module, attention: Iterable[nn.Module]) -> None:
    """Refuse a model that tensor parallelism shards without a word on which heads a process has, for all processes."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    said = any(getattr(module, "head_part", (0, 1))[1] > 1 for module in attention)
    if several and not said and _is_tensor_parallel(model):
        raise ArgumentError(
            "process_group=None is not accepted for a model whose parameters are sharded by tensor parallelism, as "
            "heads of other processes would count as more rows: give the attention "
            "attnscale.distributed.HeadParallel() in the plan of parallelize_module, or the monitor the process_group "
            "of those whose rows differ"
        )


def _is_tensor_parallel(model: nn.Module) -> bool:
    """`fully_shard` shards parameters once; more than that is tensor parallelism."""
    sharded = 0
    for parameter in model.parameters():
        placements = getattr(parameter, "placements", ())
        sharded = max(sharded, sum(type(placement).__name__.endswith("Shard") for placement in placements))
    by_data = any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__)
    return sharded > by_data
