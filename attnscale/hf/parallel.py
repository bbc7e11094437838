"""What attention cannot do, or apply must not do, in a distributed run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale.errors import ArgumentError, BackendError

# Where torch keeps its context parallelism: a module that few programs import.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_context_parallel(query: Tensor) -> None:
    """Refuse a call in which each process holds a part of the sequence: it would count the keys of that part alone."""
    if sequence_is_split() or (type(query) is not Tensor and _is_sharded_by_row(query)):
        raise BackendError(
            "attnscale does not work under context parallelism yet: each process would count the keys of its own part "
            "of the sequence, and so use a wrong β; train without it (cp_size=1), or call handle.remove() first"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sequence_is_split() -> bool:
    """Whether torch's `context_parallel`, which Trainer and accelerate use too, is active in this process."""
    return F.scaled_dot_product_attention in getattr(sys.modules.get(_CONTEXT_PARALLEL), "_replaced_functions", ())


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse to add parameters to a model that a data-parallel wrapper has already taken over."""
    for wrapper, order in _wrappers(model):
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: {wrapper} holds it already and would not synchronise what "
            f"the policy learns; call attnscale.hf.apply first, then {order}, then build the optimizer"
        )


def _wrappers(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What synchronises or shards a model, and the call that has to come after `apply`."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    kinds: dict[type, tuple[str, str]] = {
        DistributedDataParallel: ("DistributedDataParallel", "DistributedDataParallel(model)"),
        FullyShardedDataParallel: ("FullyShardedDataParallel", "FullyShardedDataParallel(model)"),
        FSDPModule: ("fully_shard", "fully_shard(model)"),
    }
    # A model does not know what wraps it, and people apply to `wrapper.module`: so every live module is asked.
    live: list[nn.Module] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
    own = {id(module) for module in model.modules()}
    for candidate in live:
        for kind, names in kinds.items():
            if isinstance(candidate, kind) and (
                id(candidate) in own or any(module is model for module in candidate.modules())
            ):
                yield names


def _is_sharded_by_row(query: Tensor) -> bool:
    """Whether queries [B, H, Tq, D] are a DTensor of which each process holds some rows."""
    return any(placement.is_shard(2) for placement in getattr(query, "placements", ()))
