"""The kernels that can be launched, as launches on tensors without storage: head dimensions, dtypes, and every flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale_kernels.launch import Launch, Resources, assuming
from attnscale_kernels.visibility import Visibility

BATCH, HEADS, KV_HEADS, LENGTH = 2, 32, 8, 4096
SCALE = 0.1
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Variant(NamedTuple):
    """One kernel as it is launched for one case."""

    family: str  # and in `name` what it is launched for
    name: str
    dtype: str
    dim: int
    products: int  # matrix products of a tile in the inner loop
    build: Callable[[], Launch]

    @property
    def key(self) -> str:
        """What the table knows it by."""
        return f"{self.family} {self.dtype} D{self.dim} {self.name}"

    def launch(self, resources: Resources) -> Launch:
        """As it would be launched on a device that has these."""
        with assuming(resources):
            return self.build()


def variants() -> list[Variant]:
    """All of them, in the order of the table."""
    from attnscale.bench.static.more_variants import decode_variants, gap_variants, softmax_variants

    return [*_forward(), *_backward(), *softmax_variants(), *gap_variants(), *decode_variants()]


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
    """What rows see, by a word; all but `everything`, `bounds` and masks are causal."""
    table = meta(BATCH, LENGTH, dtype=torch.int32)
    return {
        "everything": Visibility(),
        "causal": Visibility(right=0),
        "window": Visibility(right=0, left=1023),
        "bounds": Visibility(start=table, stop=table),
        "padding": Visibility(right=0, padding=meta(BATCH, LENGTH, dtype=torch.bool)),
        "bool mask": Visibility(mask=meta(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)),
        "bias": Visibility(mask=meta(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)),
    }[rule]


STATISTICS = {"plain": (False, False), "entropy": (True, False), "entropy, squares": (True, True)}


def _forward() -> Iterator[Variant]:
    half, full = torch.bfloat16, torch.float32
    for dim in (64, 128):
        for level in STATISTICS:
            yield _one_forward(dim, half, "causal", level)
    for rule in ("everything", "window", "bounds", "padding", "bool mask", "bias"):
        yield _one_forward(128, half, rule, "entropy")
    for extra in ("softcap", "sinks", "dropout"):
        yield _one_forward(128, half, "causal", "entropy", extra)
    yield _one_forward(128, half, "bias", "entropy, squares", "softcap", "sinks", "dropout")
    for dim in (16, 32, 80, 96, 192, 256):
        yield _one_forward(dim, half, "causal", "entropy")
    for dim in (64, 128):
        yield _one_forward(dim, torch.float16, "causal", "entropy")
    for dim in (64, 128, 256):
        yield _one_forward(dim, full, "causal", "entropy")


def _one_forward(dim: int, dtype: torch.dtype, rule: str, level: str, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.flash.forward import forward_launch

        query, key, beta = heads_of(dim, dtype)
        entropy, squares = STATISTICS[level]
        dropout = "dropout" in extras
        return forward_launch(
            query, key, key, beta, seen_by(rule), scale=SCALE, softcap=30.0 if "softcap" in extras else None,
            sinks=meta(HEADS) if "sinks" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, entropy=entropy, squares=squares,
        )[0]  # fmt: skip

    return Variant("forward", ", ".join((rule, *extras, level)), NAMES[dtype], dim, 2, build)


def _backward() -> Iterator[Variant]:
    half, full = torch.bfloat16, torch.float32
    yield _one_backward(0, 128, half, "causal")
    for dim in (64, 128):
        for asked in ((), ("dbeta", "norm")):
            yield _one_backward(1, dim, half, "causal", *asked)
        yield _one_backward(2, dim, half, "causal")
    for kernel in (1, 2):
        for rule in ("window", "bounds", "padding", "bool mask"):
            yield _one_backward(kernel, 128, half, rule, *("dbeta", "norm")[: 2 * (kernel == 1)])
        yield _one_backward(kernel, 128, half, "bias", "softcap", "dropout", *("dbeta", "norm")[: 2 * (kernel == 1)])
        for dim in (32, 80, 256):
            yield _one_backward(kernel, dim, half, "causal")
        for dim in (64, 128):
            yield _one_backward(kernel, dim, full, "causal")


def _one_backward(kernel: int, dim: int, dtype: torch.dtype, rule: str, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.flash.backward import backward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout = "dropout" in extras
        return backward_launches(
            query, query, key, key, beta, seen_by(rule), query, beta, scale=SCALE,
            softcap=30.0 if "softcap" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, dbeta="dbeta" in extras, score_norm="norm" in extras,
        )[0][kernel]  # fmt: skip

    family = ("backward rows", "backward dQ", "backward dK dV")[kernel]
    return Variant(family, ", ".join((rule, *extras)), NAMES[dtype], dim, (0, 3, 4)[kernel], build)
