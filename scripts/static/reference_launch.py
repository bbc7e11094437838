"""Launch of the plain reference kernel: its best tile on each target, with TMA descriptors where supported."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnscale_kernels.launch import Launch, Resources, Tile, resources_of
from scripts.static.reference_kernel import reference_forward_kernel


def reference_tile(dim: int, resources: Resources) -> Tile:
    """Return the tile with the fewest instructions per score among those without spills.

    At 128 dimensions and 99 KB of shared memory, 128 keys would take 12.9 instead of 14.7 instructions, but sm_89
    spills 24 bytes.
    """
    if resources.warp_size == 64:
        return Tile(128, 128 if dim <= 64 else 64, 4, 1)
    return Tile(128, 128 if dim <= 64 or resources.shared_memory > 160_000 else 64, 8, 2)


def has_descriptors(resources: Resources) -> bool:
    """Whether tiles are loaded through TMA descriptors: on devices with the shared memory of sm_90 and sm_100."""
    return resources.warp_size == 32 and resources.shared_memory > 200_000


def reference_launches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    tile: Tile | None = None,
    descriptors: bool | None = None,
) -> tuple[tuple[Launch], Tensor]:
    """Build causal attention of contiguous tensors [B, H, T, D]; T is a multiple of the tile, D a power of two."""
    batch, heads, length, dim = query.shape
    resources = resources_of(query.device)
    tile = tile or reference_tile(dim, resources)
    descriptors = has_descriptors(resources) if descriptors is None else descriptors
    out = torch.empty_like(query)
    flat = dict(zip(("q", "k", "v", "out"), (x.view(-1, dim) for x in (query, key, value, out)), strict=True))
    arguments: dict[str, object] = dict(flat)
    if descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = {"q": tile.m, "k": tile.n, "v": tile.n, "out": tile.m}
        arguments = {name: TensorDescriptor.from_tensor(flat[name], [blocks[name], dim]) for name in flat}
    arguments |= {
        "lse_ptr": query.new_empty(query.shape[:3], dtype=torch.float32),
        "length": length,
        "edge_keys": tile.m,
        "c": scale * math.log2(math.e),
    }
    constants: dict[str, object] = {
        "D": dim,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "DESCRIPTORS": descriptors,
        "PRECISION": "ieee",
    }
    grid = batch * heads * (length // tile.m)
    return (Launch(reference_forward_kernel, grid, arguments, constants, tile.warps, tile.stages),), out
