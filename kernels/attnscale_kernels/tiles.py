"""Which tile a kernel works on: by head dimension, dtype and what the device has, not by its name."""

from __future__ import annotations

from typing import NamedTuple

from .launch import Resources


class Tile(NamedTuple):
    """Query rows and keys of a tile, warps of a program, and how many tiles of keys are in flight."""

    m: int
    n: int
    warps: int
    stages: int


def forward_tile(dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For the forward, with head dimensions as padded and bytes of an element."""
    widest = max(dim, value_dim)
    if size == 4:
        return Tile(64, 32, 4, 2) if widest <= 64 else Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if resources.warp_size == 64:
        return Tile(128, 64, 4, 1) if widest <= 64 else Tile(128, 32, 4, 1) if widest <= 128 else Tile(64, 32, 4, 1)
    keys = 64 if widest <= 128 else 32
    return Tile(128 if widest <= 128 else 64, keys, 4 if widest <= 64 else 8, 3 if widest <= 128 else 2)


def backward_query_tile(dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For the gradient of queries: like the forward, with one product more."""
    widest = max(dim, value_dim)
    if size == 4:
        return Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if widest <= 64:
        return Tile(128, 64, 8, 2) if resources.warp_size == 32 else Tile(64, 64, 4, 1)
    return Tile(128, 32, 8, 2) if widest <= 128 else Tile(64, 32, 8, 1)


def backward_key_tile(dim: int, value_dim: int, size: int, resources: Resources) -> Tile:
    """For the gradients of keys and values, which hold two accumulators; m is the rows of a step."""
    widest = max(dim, value_dim)
    if size == 4:
        return Tile(32, 32, 4, 1) if widest <= 128 else Tile(16, 16, 4, 1)
    if widest <= 64:
        return Tile(64, 128, 8, 2) if resources.warp_size == 32 else Tile(32, 64, 4, 1)
    return Tile(32, 128, 8, 2) if widest <= 128 else Tile(32, 64, 8, 1)
