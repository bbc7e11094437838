"""Variants of flash attention: forward and backward by head dimension, dtype, rule of visibility and flag."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnscale.bench.static.calls import MASKED
from attnscale.bench.static.phases import Structure
from attnscale.bench.static.variant import HEADS, NAMES, SCALE, Variant, heads_of, meta, phases_of, seen_by
from attnscale_kernels.launch import Launch, Tile


def mask_variants() -> Iterator[Variant]:
    """What finds the tiles of a mask before the forward and, by keys, before dK and dV."""
    for name, dtype in (("bool", "bool"), ("additive", "bf16")):
        yield _mask("mask squares", name, dtype, Structure(), 0)
    for name, place in (("for rows", 1), ("for keys", 2)):
        yield _mask("mask tiles", name, "bool", Structure(("hot",), sweeps=2), place)


def _mask(family: str, name: str, dtype: str, structure: Structure, place: int) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.flash.launch import backward_launches

        query, key, beta = heads_of(128, torch.bfloat16)
        visibility = seen_by("bias" if name == "additive" else "bool mask")
        return backward_launches(query, query, key, key, beta, visibility, query, beta, scale=SCALE)[0][place]

    return Variant(family, name, dtype, 0, 0, structure, build)


def forward_variants() -> Iterator[Variant]:
    """The forward with and without entropy, and with each flag."""
    half, full = torch.bfloat16, torch.float32
    for dim in (64, 128):
        for level in ("plain", "entropy"):
            yield forward_variant(dim, half, "causal", level)
    for rule in ("everything", "window", "bounds", "padding", "bool mask", "block-sparse", "bias"):
        yield forward_variant(128, half, rule, "entropy")
    for extra in ("softcap", "sinks", "dropout"):
        yield forward_variant(128, half, "causal", "entropy", extra)
    yield forward_variant(128, half, "bias", "entropy", "softcap", "sinks", "dropout")
    for dim in (16, 24, 32, 40, 72, 80, 88, 96, 104, 192, 256):
        yield forward_variant(dim, half, "causal", "entropy")
    for dim in (64, 128):
        yield forward_variant(dim, torch.float16, "causal", "entropy")
    for dim in (64, 128, 256):
        yield forward_variant(dim, full, "causal", "entropy")


def forward_variant(
    dim: int, dtype: torch.dtype, rule: str, level: str, *extras: str, tile: Tile | None = None
) -> Variant:
    """The forward under a rule, at a tile of choice or at that of the rules of tiles."""

    def build() -> Launch:
        from attnscale_kernels.flash.launch import forward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout = "dropout" in extras
        return forward_launches(
            query, key, key, beta, seen_by(rule), scale=SCALE, softcap=30.0 if "softcap" in extras else None,
            sinks=meta(HEADS) if "sinks" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, entropy=level == "entropy",
            tile=tile,
        )[0][-1]  # fmt: skip

    structure = Structure(phases_of(rule), repairs=True)
    return Variant("forward", ", ".join((rule, *extras, level)), NAMES[dtype], dim, 2, structure, build)


def backward_variants() -> Iterator[Variant]:
    """The three kernels of the backward, dQ also with dβ."""
    half, full = torch.bfloat16, torch.float32
    yield backward_variant(0, 128, half, "causal")
    for dim in (64, 128):
        yield backward_variant(1, dim, half, "causal")
        yield backward_variant(1, dim, half, "causal", "dbeta")
        yield backward_variant(2, dim, half, "causal")
    for kernel, asked in ((1, ("dbeta",)), (2, ())):
        for rule in ("window", "bounds", "padding", "bool mask", "block-sparse"):
            yield backward_variant(kernel, 128, half, rule, *asked)
        yield backward_variant(kernel, 128, half, "bias", "softcap", "dropout", *asked)
        for dim in (32, 40, 80, 104, 256):
            yield backward_variant(kernel, dim, half, "causal")
        for dim in (64, 128):
            yield backward_variant(kernel, dim, full, "causal")


def backward_variant(
    kernel: int, dim: int, dtype: torch.dtype, rule: str, *extras: str, tile: Tile | None = None
) -> Variant:
    """A kernel of the backward: what is said of each row (0), dQ (1), dK and dV (2); a tile is that of the last two."""

    def build() -> Launch:
        from attnscale_kernels.flash.launch import backward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout = "dropout" in extras
        return backward_launches(
            query, query, key, key, beta, seen_by(rule), query, beta, scale=SCALE,
            softcap=30.0 if "softcap" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, dbeta="dbeta" in extras,
            query_tile=tile, key_tile=tile,
        )[0][kernel - 3]  # fmt: skip

    family = ("backward rows", "backward dQ", "backward dK dV")[kernel]
    structure = (
        Structure(),
        Structure(phases_of(rule), repairs=True),
        Structure(("hot", "after") if rule in MASKED else ("before", "hot", "after"), heads_around=True),
    )[kernel]
    return Variant(family, ", ".join((rule, *extras)), NAMES[dtype], dim, (0, 3, 4)[kernel], structure, build)
