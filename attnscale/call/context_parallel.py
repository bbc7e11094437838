"""torch's own context parallelism: whether it is active, and its refusal where n would be that of one process."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from attnscale.errors import BackendError

# Where torch keeps its context parallelism: a module that few programs import.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def sequence_is_split() -> bool:
    """Whether torch's `context_parallel`, which Trainer and accelerate use too, is active in this process."""
    module = sys.modules.get(_CONTEXT_PARALLEL)
    return module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ())


def active_mesh() -> Any | None:
    """The DeviceMesh of torch's `context_parallel` where it is active, else None.

    torch has no name for it; the function that replaces attention holds it.
    """
    cells = F.scaled_dot_product_attention.__closure__ or () if sequence_is_split() else ()
    held = (cell.cell_contents for cell in cells)
    return next((value for value in held if type(value).__name__ == "DeviceMesh"), None)


def rotates_keys() -> bool:
    """Whether keys are to be passed on from process to process (`set_rotate_method("alltoall")`), or gathered."""
    options = getattr(sys.modules.get(_CONTEXT_PARALLEL), "_cp_options", None)
    return getattr(getattr(options, "rotate_method", None), "name", "") == "ALL_TO_ALL"


def refuse_context_parallel(query: Tensor, what_to_do: str) -> None:
    """Refuse a call in which each process holds a part of the sequence; `what_to_do` ends the message."""
    if sequence_is_split() or (type(query) is not Tensor and _is_sharded_by_row(query)):
        raise BackendError(
            "under context parallelism each process would count the keys of its own part of the sequence, and so use a "
            f"wrong β; {what_to_do}"
        )


def _is_sharded_by_row(query: Tensor) -> bool:
    """Whether queries [..., Tq, D] are a DTensor of which each process holds some rows."""
    return any(placement.is_shard(query.dim() - 2) for placement in getattr(query, "placements", ()))
