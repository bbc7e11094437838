"""Refusal of torch's context parallelism, where a process would count only its own part of the keys."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.nn import functional as F

from attnscale.errors import BackendError

# Where torch keeps its context parallelism: a module that few programs import.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def sequence_is_split() -> bool:
    """Whether torch's `context_parallel`, which Trainer and accelerate use too, is active in this process."""
    module = sys.modules.get(_CONTEXT_PARALLEL)
    return module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ())


def refuse_context_parallel(query: Tensor, what_to_do: str) -> None:
    """Refuse a call in which each process holds a part of the sequence; `what_to_do` ends the message."""
    if sequence_is_split() or (type(query) is not Tensor and _is_sharded_by_row(query)):
        raise BackendError(
            "attnscale does not work under context parallelism yet: each process would count the keys of its own part "
            f"of the sequence, and so use a wrong β; {what_to_do}"
        )


def _is_sharded_by_row(query: Tensor) -> bool:
    """Whether queries [..., Tq, D] are a DTensor of which each process holds some rows."""
    return any(placement.is_shard(query.dim() - 2) for placement in getattr(query, "placements", ()))
