"""One kernel as it is launched for one case, on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.bench.static.calls import MASKED
from attnscale.bench.static.phases import Structure
from attnscale_kernels.launch import Launch, Resources, assuming
from attnscale_kernels.visibility import Visibility

BATCH, HEADS, KV_HEADS, LENGTH = 2, 32, 8, 4096
SCALE = 0.1
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Variant(NamedTuple):
    """A kernel, and how to make the launch of one case."""

    family: str
    name: str  # of the case
    dtype: str
    dim: int
    products: int  # matrix products of a tile, over all sweeps
    structure: Structure
    build: Callable[[], Launch]

    @property
    def key(self) -> str:
        """Its name in the table."""
        return f"{self.family} {self.dtype} D{self.dim} {self.name}"

    def launch(self, resources: Resources) -> Launch:
        """As it would be launched on a device with these resources."""
        with assuming(resources):
            return self.build()


def phases_of(rule: str, *, listed: bool = True) -> tuple[str, ...]:
    """The phases that a loop over keys is compiled to, as `first_phase` of attnscale_kernels/phases.py has it.

    Kernels that do not have the tiles of a mask `listed` take each of them for an edge.
    """
    if rule in ("window", "bounds", "padding"):
        return ("before", "hot", "after")
    return ("after",) if rule in MASKED and not listed else ("hot", "after")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that has a shape and no storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_of(dim: int, dtype: torch.dtype, queries: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (and so values) and β of grouped-query attention."""
    return (
        meta(BATCH, HEADS, queries, dim, dtype=dtype),
        meta(BATCH, KV_HEADS, LENGTH, dim, dtype=dtype),
        meta(BATCH, HEADS, queries),
    )


def seen_by(rule: str) -> Visibility:
    """What rows see, by the name of a rule; all but `everything`, `bounds` and masks are causal."""
    table = meta(BATCH, LENGTH, dtype=torch.int32)
    mask = meta(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    return {
        "everything": Visibility(),
        "causal": Visibility(right=0),
        "window": Visibility(right=0, left=1023),
        "bounds": Visibility(start=table, stop=table),
        "padding": Visibility(right=0, padding=meta(BATCH, LENGTH, dtype=torch.bool)),
        "bool mask": Visibility(mask=mask),
        "block-sparse": Visibility(mask=mask),
        "bias": Visibility(mask=meta(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)),
    }[rule]
