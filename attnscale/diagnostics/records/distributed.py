"""Joins what the processes of a distributed run have measured, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

from attnscale._util.uncopied import Uncopied
from attnscale.diagnostics.alerts import Notices
from attnscale.errors import ArgumentError

# Rows per quantity and head that all processes together send for the quantiles, and the fewest of one process.
SENT_ROWS = 512
FEWEST_ROWS = 8
STEP_MODULUS = 2**24  # a float32 holds smaller integers exactly


class Part(NamedTuple):
    """The numbers of a layer from P processes, [P, H, W], of its calls in training or in evaluation.

    Its heads are those from `first` on, where processes have different heads of the layer.
    """

    layer: str
    training: bool
    rows: Tensor
    first: int = 0


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


class Processes(Uncopied):
    """A process group, in which every process has a monitor, here with layers of these names.

    A report is one collective. Each process sends a header with its number of heads of every layer, and the numbers of
    those layers whose size all processes know. Where the headers contain a size that was not known, as at the first
    call of a layer, all learn it and send again.

    `names` maps each layer to the part of its heads that this process has, counted from 0. Processes with the same part
    have different rows, which are added; those with different parts have different heads of the same rows.
    """

    def __init__(self, names: Mapping[str, int], group: distributed.ProcessGroup | None, notices: Notices) -> None:
        self._names = dict(names)
        self._group = group
        self._notices = notices
        self._heads: dict[str, int] = {}  # of all processes' layers; 0: not known yet
        self._head_parts: list[dict[str, int]] = []  # of each process

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

    @property
    def sample(self) -> int:
        """How many rows each process sends for the quantiles."""
        return max(FEWEST_ROWS, SENT_ROWS // self.number)

    def join(self, step: int, here: Mapping[str, Part], width: int) -> list[Part]:
        """The parts of all processes, from those of this one, each [1, H, width]."""
        here = {name: part._replace(first=self._names[name] * part.rows.shape[1]) for name, part in here.items()}
        if self.number == 1:
            return list(here.values())
        if not self._heads:
            self._heads = self._gather_layers(here)
        while True:
            gathered = self._gather(self._message(step, here, width))
            steps, header = gathered[:, 0].tolist(), gathered[:, 1 : 1 + 2 * len(self._heads)]
            if len(set(steps)) > 1:
                self._warn("steps", f"they are at the steps {', '.join(f'{step:.0f}' for step in steps)}")
                return list(here.values())
            heads, modes = header.to(torch.int64).view(len(gathered), 2, -1).unbind(1)
            known, self._heads = self._heads, self._learned(heads)
            if self._heads == known:  # all processes find the same answer
                return self._parts(gathered[:, 1 + header.shape[1] :], heads, modes, here, width)

    def _gather_layers(self, here: Mapping[str, Part]) -> dict[str, int]:
        """The layers of all processes in the order of the first that has them, with the known numbers of heads."""
        mine = [(name, here[name].rows.shape[1] if name in here else 0, part) for name, part in self._names.items()]
        theirs: list[list[tuple[str, int, int]] | None] = [None] * self.number
        distributed.all_gather_object(theirs, mine, group=self._group)
        self._head_parts = [{name: part for name, _, part in layers or ()} for layers in theirs]
        found: dict[str, int] = {}
        for name, heads, _ in (layer for layers in theirs for layer in layers or ()):
            found[name] = max(found.get(name, 0), heads)
        return found

    def _message(self, step: int, here: Mapping[str, Part], width: int) -> Tensor:
        """Step, heads and modes of all layers, and the numbers of layers with as many heads as expected."""
        heads = [here[name].rows.shape[1] if name in here else 0 for name in self._heads]
        modes = [int(here[name].training) if name in here else 0 for name in self._heads]
        rows = [
            here[name].rows.flatten()
            if name in here and own == expected
            else torch.zeros(expected * width, device="cpu")
            for (name, expected), own in zip(self._heads.items(), heads, strict=True)
        ]
        return torch.cat(
            [torch.tensor([step % STEP_MODULUS, *heads, *modes], dtype=torch.float32, device="cpu"), *rows]
        )

    def _gather(self, message: Tensor) -> Tensor:
        """The messages of all processes, [P, ...]."""
        sent = message.to("cuda") if distributed.get_backend(self._group) == "nccl" else message
        everywhere = [torch.empty_like(sent) for _ in range(self.number)]
        distributed.all_gather(everywhere, sent, group=self._group)
        return torch.stack(everywhere).to(message.device)

    def _learned(self, heads: Tensor) -> dict[str, int]:
        """What is known of numbers of heads once the processes have told theirs, [P, layers]."""
        return {
            name: max(column) if len(set(column) - {0}) == 1 else expected
            for (name, expected), column in zip(self._heads.items(), heads.T.tolist(), strict=True)
        }

    def _parts(self, rows: Tensor, heads: Tensor, modes: Tensor, here: Mapping[str, Part], width: int) -> list[Part]:
        """Each layer that was called, from the processes that trained it, or else from those that evaluated it."""
        found: list[Part] = []
        bodies = torch.split(rows, [expected * width for expected in self._heads.values()], dim=1)
        for index, ((name, expected), body) in enumerate(zip(self._heads.items(), bodies, strict=True)):
            column, trained = heads[:, index], modes[:, index] == 1
            if len(set(column.tolist()) - {0}) > 1:
                self._warn("heads", f"{name} has {', '.join(map(str, column.tolist()))} heads there")
                found += [here[name]] if name in here else []
            elif bool((column > 0).any()):
                training = bool(trained.any())
                chosen = trained if training else column > 0
                parts = torch.tensor([of_process.get(name, 0) for of_process in self._head_parts], device="cpu")
                for part in sorted(set(parts[chosen].tolist())):
                    own = body[chosen & (parts == part)].view(-1, expected, width)
                    found.append(Part(name, training, own, part * expected))
        return found

    def _warn(self, kind: str, reason: str) -> None:
        self._notices.add(
            kind,
            f"the reports of {self.number} processes cannot be joined: {reason}; each goes on with its own. "
            "Give the monitor a process_group of those that hold the same layers",
        )
