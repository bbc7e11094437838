"""Variants of flash attention: forward and backward by head dimension, dtype, rule of visibility and flag."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnscale.bench.static.calls import MASKED
from attnscale.bench.static.phases import Structure
from attnscale.bench.static.variant import HEADS, NAMES, SCALE, Variant, heads_of, meta, phases_of, seen_by
from attnscale_kernels.launch import Launch


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
            yield _forward(dim, half, "causal", level)
    for rule in ("everything", "window", "bounds", "padding", "bool mask", "block-sparse", "bias"):
        yield _forward(128, half, rule, "entropy")
    for extra in ("softcap", "sinks", "dropout"):
        yield _forward(128, half, "causal", "entropy", extra)
    yield _forward(128, half, "bias", "entropy", "softcap", "sinks", "dropout")
    for dim in (16, 24, 32, 40, 72, 80, 88, 96, 104, 192, 256):
        yield _forward(dim, half, "causal", "entropy")
    for dim in (64, 128):
        yield _forward(dim, torch.float16, "causal", "entropy")
    for dim in (64, 128, 256):
        yield _forward(dim, full, "causal", "entropy")


def _forward(dim: int, dtype: torch.dtype, rule: str, level: str, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.flash.launch import forward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout = "dropout" in extras
        return forward_launches(
            query, key, key, beta, seen_by(rule), scale=SCALE, softcap=30.0 if "softcap" in extras else None,
            sinks=meta(HEADS) if "sinks" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, entropy=level == "entropy",
        )[0][-1]  # fmt: skip

    structure = Structure(phases_of(rule), repairs=True)
    return Variant("forward", ", ".join((rule, *extras, level)), NAMES[dtype], dim, 2, structure, build)


def backward_variants() -> Iterator[Variant]:
    """The three kernels of the backward, dQ also with dβ."""
    half, full = torch.bfloat16, torch.float32
    yield _backward(0, 128, half, "causal")
    for dim in (64, 128):
        yield _backward(1, dim, half, "causal")
        yield _backward(1, dim, half, "causal", "dbeta")
        yield _backward(2, dim, half, "causal")
    for kernel, asked in ((1, ("dbeta",)), (2, ())):
        for rule in ("window", "bounds", "padding", "bool mask", "block-sparse"):
            yield _backward(kernel, 128, half, rule, *asked)
        yield _backward(kernel, 128, half, "bias", "softcap", "dropout", *asked)
        for dim in (32, 40, 80, 104, 256):
            yield _backward(kernel, dim, half, "causal")
        for dim in (64, 128):
            yield _backward(kernel, dim, full, "causal")


def _backward(kernel: int, dim: int, dtype: torch.dtype, rule: str, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.flash.launch import backward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout = "dropout" in extras
        return backward_launches(
            query, query, key, key, beta, seen_by(rule), query, beta, scale=SCALE,
            softcap=30.0 if "softcap" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, dbeta="dbeta" in extras,
        )[0][kernel - 3]  # fmt: skip

    family = ("backward rows", "backward dQ", "backward dK dV")[kernel]
    structure = (
        Structure(),
        Structure(phases_of(rule), repairs=True),
        Structure(("hot", "after") if rule in MASKED else ("before", "hot", "after"), heads_around=True),
    )[kernel]
    return Variant(family, ", ".join((rule, *extras)), NAMES[dtype], dim, (0, 3, 4)[kernel], structure, build)
