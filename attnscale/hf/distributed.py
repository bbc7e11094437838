"""What is refused in a distributed run: context parallelism, and learned policies in a model that is wrapped."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from attnscale.call.context_parallel import refuse_context_parallel, sequence_is_split
from attnscale.errors import ArgumentError


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _sequence_is_split() -> bool:
    return sequence_is_split()


def refuse_split_sequence(query: Tensor) -> None:
    """Refuse attention under context parallelism, compiled or not."""
    if _sequence_is_split() or type(query) is not Tensor:
        refuse_context_parallel(query, "train without it (cp_size=1), or call handle.remove() first")


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse to add parameters to a model that a data-parallel wrapper holds, which would not synchronise them."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    own = {id(module) for module in model.modules()}
    # A model does not know what wraps it, and `wrapper.module` may be what was passed: look through all live modules.
    live: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
        name = "fully_shard" if kind is FSDPModule else kind.__name__
        for wrapper in (module for module in live if isinstance(module, kind)):
            if id(wrapper) in own or any(module is model for module in wrapper.modules()):
                raise ArgumentError(
                    f"model={type(model).__name__} is not accepted: {name} holds it already and would not synchronise "
                    f"what the policy learns; call attnscale.hf.apply first, then {name}(model), then build the "
                    "optimizer"
                )
