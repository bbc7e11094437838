"""Which tokens of a sequence each process of a context-parallel group holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from attnscale._util.processes import wait
from attnscale._util.tracing import is_watched
from attnscale.errors import reject, reject_type


class TokenShards(NamedTuple):
    """A sequence of T = P·L tokens over P processes: `slots` [P, B|1, L] are the places of their tokens in it."""

    slots: Tensor
    rank: int
    group: distributed.ProcessGroup

    @classmethod
    def of(cls, positions: Tensor, mesh: DeviceMesh, tokens: int) -> TokenShards:
        """From the places [L] or [B|1, L] of this process's tokens, or [T], [B|1, T] of those of all processes in turn.

        The second form is what torch's load balancers generate; the first costs a gather of L integers.
        """
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            reject_type("mesh", mesh, "a DeviceMesh of one dimension, such as mesh['cp']")
        if not isinstance(positions, Tensor) or positions.dtype.is_floating_point or positions.dtype == torch.bool:
            reject_type("positions", positions, "an integer tensor: the place of each token in the whole sequence")
        size, group = mesh.size(), mesh.get_group()
        places = positions.reshape(-1, positions.shape[-1]).to(torch.int64)  # [B|1, L or T]
        if size > 1 and places.shape[1] == size * tokens:
            slots = places.unflatten(1, (size, tokens)).movedim(1, 0)  # type: ignore[no-untyped-call]
        elif places.shape[1] == tokens:
            slots = collectives.all_gather_single(places.contiguous(), 0, group)
            slots = wait(slots).view(size, *places.shape)
        else:
            reject(
                "positions.shape", list(positions.shape), f"[..., {tokens}] of this process, or [..., {size * tokens}]"
            )
        shards = cls(slots, mesh.get_local_rank(), group)
        # Read on the CPU only: on other devices it would synchronise.
        if slots.device.type == "cpu" and not is_watched() and not shards.is_whole():
            reject(
                "positions",
                positions.tolist(),
                f"every place 0 … {size * tokens - 1} of the sequence once over all processes; for packed documents "
                "too, with their edges as cu_seqlens or document_ids",
            )
        return shards

    @property
    def size(self) -> int:
        """P."""
        return self.slots.shape[0]

    @property
    def tokens(self) -> int:
        """T, of all processes."""
        return self.slots.shape[0] * self.slots.shape[2]

    @property
    def own(self) -> Tensor:
        """The places of this process's tokens, [B|1, L]."""
        return self.slots[self.rank]

    def in_turn(self) -> Tensor:
        """The places of all tokens, process after process, [B|1, T]."""
        return self.slots.movedim(0, 1).flatten(1)

    def is_whole(self) -> bool:
        """Whether every place is held exactly once."""
        expected = torch.arange(self.tokens, device=self.slots.device)
        return bool((self.in_turn().sort(-1).values == expected).all())


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """x [B, H, T, D] at the tokens [B|1, N]: [B, H, N, D]."""
    if index.shape[0] == 1:
        return x.index_select(2, index[0])
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
