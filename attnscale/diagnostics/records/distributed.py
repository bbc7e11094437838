"""What all processes of a run have heard, joined layer by layer under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from attnscale._util.uncopied import Uncopied
from attnscale.diagnostics.notices import Notices

# Rows per quantity and head that all processes together send for the quantiles, and the fewest of one.
SENT = 512
FEWEST = 8
# Steps are compared modulo this: a float holds such a number exactly.
STEPS = 2**24


class Part(NamedTuple):
    """What processes tell of a layer: rows of numbers [P, H, W]; `training`, or else evaluation."""

    layer: str
    training: bool
    rows: Tensor


class Processes(Uncopied):
    """The processes of a group, each with a monitor of its own that has layers of these names.

    A report is one collective of a layout that all know: a header with the heads that each process has heard of every
    layer, and the numbers of those. What is new to some process, such as the number of heads of a layer that is heard
    for the first time, makes them send once more.
    """

    def __init__(self, names: Sequence[str], group: distributed.ProcessGroup | None, notices: Notices) -> None:
        self._names = list(names)
        self._group = group
        self._notices = notices
        self._heads: dict[str, int] | None = None  # of the layers of all, 0 where not known yet

    @property
    def number(self) -> int:
        """How many there are."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return 1
        return distributed.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """Which this one is."""
        return 0 if self.number == 1 else distributed.get_rank(self._group)

    @property
    def sample(self) -> int:
        """How many rows each sends for the quantiles."""
        return max(FEWEST, SENT // self.number)

    def join(self, step: int, here: Mapping[str, Part], width: int) -> list[Part]:
        """What all have heard of each layer, from what was heard here, each [1, H, width]."""
        if self.number == 1:
            return list(here.values())
        if self._heads is None:
            self._heads = self._meet(here)
        while True:
            gathered = self._gather(self._message(step, here, width))
            steps, told = gathered[:, 0].tolist(), gathered[:, 1 : 1 + 2 * len(self._heads)]
            if len(set(steps)) > 1:
                self._refuse("steps", f"they are at the steps {', '.join(f'{one:.0f}' for one in steps)}")
                return list(here.values())
            heads, modes = told.to(torch.int64).view(len(gathered), 2, -1).unbind(1)
            if not self._learn(heads):
                return self._parts(gathered[:, 1 + told.shape[1] :], heads, modes, here, width)

    def _meet(self, here: Mapping[str, Part]) -> dict[str, int]:
        """The layers of all processes in the order of the first that has them, with the heads that are known."""
        mine = [(name, here[name].rows.shape[1] if name in here else 0) for name in self._names]
        theirs: list[list[tuple[str, int]] | None] = [None] * self.number
        distributed.all_gather_object(theirs, mine, group=self._group)
        found: dict[str, int] = {}
        for name, heads in (layer for layers in theirs for layer in layers or ()):
            found[name] = max(found.get(name, 0), heads)
        return found

    def _message(self, step: int, here: Mapping[str, Part], width: int) -> Tensor:
        """Step, heads and modes of all layers, and the numbers of those with as many heads as all expect."""
        layers = self._heads or {}
        heads = [here[name].rows.shape[1] if name in here else 0 for name in layers]
        modes = [int(here[name].training) if name in here else 0 for name in layers]
        rows = [
            here[name].rows.flatten() if name in here and told == expected else torch.zeros(expected * width)
            for (name, expected), told in zip(layers.items(), heads, strict=True)
        ]
        return torch.cat([torch.tensor([step % STEPS, *heads, *modes], dtype=torch.float32), *rows])

    def _gather(self, message: Tensor) -> Tensor:
        """What each has sent, [P, ...]."""
        sent = message.to("cuda") if distributed.get_backend(self._group) == "nccl" else message
        everywhere = [torch.empty_like(sent) for _ in range(self.number)]
        distributed.all_gather(everywhere, sent, group=self._group)
        return torch.stack(everywhere).to(message.device)

    def _learn(self, heads: Tensor) -> bool:
        """Whether what processes have told, [P, layers], was not known; all of them come to the same answer."""
        known = self._heads or {}
        found = {
            name: max(column) if len(_spoken(column)) == 1 else expected
            for (name, expected), column in zip(known.items(), heads.T.tolist(), strict=True)
        }
        self._heads = found
        return found != known

    def _parts(self, rows: Tensor, heads: Tensor, modes: Tensor, here: Mapping[str, Part], width: int) -> list[Part]:
        """Of every layer that somebody has heard, what those who have trained it tell, or else those who have not."""
        found: list[Part] = []
        layers = self._heads or {}
        bodies = torch.split(rows, [expected * width for expected in layers.values()], dim=1)
        for index, ((name, expected), body) in enumerate(zip(layers.items(), bodies, strict=True)):
            column, trained = heads[:, index], modes[:, index] == 1
            if len(_spoken(column.tolist())) > 1:
                self._refuse("heads", f"{name} has {', '.join(map(str, column.tolist()))} heads there")
                found += [here[name]] if name in here else []
            elif bool((column > 0).any()):
                training = bool(trained.any())
                chosen = trained if training else column > 0
                found.append(Part(name, training, body[chosen].view(-1, expected, width)))
        return found

    def _refuse(self, kind: str, reason: str) -> None:
        self._notices.add(
            kind,
            f"the reports of {self.number} processes cannot be joined: {reason}; each goes on with its own. "
            "Give the monitor a process_group of those that hold the same layers",
        )


def _spoken(heads: Sequence[int]) -> set[int]:
    """The numbers of heads that processes have told of a layer; those that have not heard it tell 0."""
    return {number for number in heads if number}
