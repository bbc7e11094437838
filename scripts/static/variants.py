"""All launchable kernels by family, on tensors without storage: the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale_kernels.gaps.bins import BINS
from attnscale_kernels.launch import Launch, Resources, assuming
from attnscale_kernels.visibility import Visibility
from scripts.static.calls import MASKED
from scripts.static.counts import Structure
from scripts.static.table import REFERENCE

BATCH, HEADS, KV_HEADS, LENGTH = 2, 32, 8, 4096
SCALE = 0.1
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Variant(NamedTuple):
    """A kernel, and a function that builds its launch for one case."""

    family: str
    name: str  # case name
    dtype: str
    dim: int
    products: int  # matrix products per tile, over all sweeps
    structure: Structure
    build: Callable[[], Launch]

    @property
    def key(self) -> str:
        """Name in the table."""
        return f"{self.family} {self.dtype} D{self.dim} {self.name}"

    def launch(self, resources: Resources) -> Launch:
        """Return the launch for a device with these resources."""
        with assuming(resources):
            return self.build()


def phases_of(rule: str, *, listed: bool = True) -> tuple[str, ...]:
    """Return the compiled phases of a loop over keys, as in `first_phase` of attnscale_kernels/tiles.py.

    Kernels without tile lists (`listed`) treat each tile of a mask as an edge.
    """
    if rule in ("window", "bounds", "padding"):
        return ("before", "hot", "after")
    return ("after",) if rule in MASKED and not listed else ("hot", "after")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without storage."""
    return torch.empty(shape, dtype=dtype, device="meta")


def heads_of(dim: int, dtype: torch.dtype, queries: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys (also used as values) and β of grouped-query attention."""
    return (
        meta(BATCH, HEADS, queries, dim, dtype=dtype),
        meta(BATCH, KV_HEADS, LENGTH, dim, dtype=dtype),
        meta(BATCH, HEADS, queries),
    )


def seen_by(rule: str) -> Visibility:
    """Return the visibility of a rule; all except `everything`, `bounds` and masks are causal."""
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


def mask_variants() -> Iterator[Variant]:
    """Mask classification before the forward pass and, by keys, before dK/dV."""
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
    """The forward kernel with and without entropy, and with each flag."""
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


def forward_variant(dim: int, dtype: torch.dtype, rule: str, level: str, *extras: str) -> Variant:
    """The forward kernel under a rule."""

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
    """The three backward kernels; dQ also with dβ, all of them also with gradients of row statistics."""
    half, full = torch.bfloat16, torch.float32
    yield backward_variant(0, 128, half, "causal")
    yield backward_variant(0, 128, half, "causal", "dlse")
    for dim in (64, 128):
        yield backward_variant(1, dim, half, "causal")
        yield backward_variant(1, dim, half, "causal", "dbeta")
        yield backward_variant(2, dim, half, "causal")
        for kernel in (1, 2):
            yield backward_variant(kernel, dim, half, "causal", "dentropy")
    for kernel, asked in ((1, ("dbeta",)), (2, ())):
        for rule in ("window", "bounds", "padding", "bool mask", "block-sparse"):
            yield backward_variant(kernel, 128, half, rule, *asked)
        yield backward_variant(kernel, 128, half, "bias", "softcap", "dropout", *asked)
        for dim in (32, 40, 80, 104, 256):
            yield backward_variant(kernel, dim, half, "causal")
        for dim in (64, 128):
            yield backward_variant(kernel, dim, full, "causal")


def backward_variant(kernel: int, dim: int, dtype: torch.dtype, rule: str, *extras: str) -> Variant:
    """A backward kernel: row preprocessing (0), dQ (1), dK and dV (2)."""

    def build() -> Launch:
        from attnscale_kernels.flash.launch import StatisticsGradients, backward_launches

        query, key, beta = heads_of(dim, dtype)
        dropout, rows = "dropout" in extras, meta(BATCH, HEADS, LENGTH)
        of_stats = StatisticsGradients(*(rows if name in extras else None for name in ("dlse", "dentropy")))
        return backward_launches(
            query, query, key, key, beta, seen_by(rule), query, beta, scale=SCALE,
            softcap=30.0 if "softcap" in extras else None, dropout_p=0.1 if dropout else 0.0,
            seed=meta(1, dtype=torch.int64) if dropout else None, dbeta="dbeta" in extras, of_stats=of_stats,
        )[0][kernel - 3]  # fmt: skip

    family = ("backward rows", "backward dQ", "backward dK dV")[kernel]
    structure = (
        Structure(),
        Structure(phases_of(rule), repairs=True),
        Structure(("hot", "after") if rule in MASKED else ("before", "hot", "after"), heads_around=True),
    )[kernel]
    return Variant(family, ", ".join((rule, *extras)), NAMES[dtype], dim, (0, 3, 4)[kernel], structure, build)


def variants() -> list[Variant]:
    """All variants in table order."""
    flash = [*forward_variants(), *_reference(), *backward_variants(), *mask_variants()]
    return [*flash, *_softmax(), *_gaps(), *_decode()]


def _reference() -> Iterator[Variant]:
    """The plain baseline kernel."""
    for dim in (64, 128):
        yield Variant(REFERENCE, "causal, plain", "bf16", dim, 2, Structure(("hot", "after")), _plain_forward(dim))


def _plain_forward(dim: int) -> Callable[[], Launch]:
    def build() -> Launch:
        from scripts.static.reference_launch import reference_launches

        query = meta(BATCH, HEADS, LENGTH, dim, dtype=torch.bfloat16)
        return reference_launches(query, query, query, scale=SCALE)[0][0]

    return build


def _softmax() -> Iterator[Variant]:
    """Rows in one block and in several, with each flag."""
    yield _softmax_forward(torch.bfloat16, 1024)
    yield _softmax_forward(torch.bfloat16, 1024, "mask", "bias", "gaps")
    yield _softmax_forward(torch.bfloat16, 65536)
    yield _softmax_forward(torch.float32, 65536, "mask", "bias", "gaps")
    yield _softmax_backward(torch.bfloat16, 1024)
    yield _softmax_backward(torch.bfloat16, 1024, "dbeta")
    yield _softmax_backward(torch.bfloat16, 65536, "dbeta", "bias")


def _softmax_forward(dtype: torch.dtype, keys: int, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.softmax.launch import forward_launches

        return forward_launches(
            meta(BATCH, HEADS, 512, keys, dtype=dtype), meta(BATCH, HEADS, 512),
            mask=meta(BATCH, 1, 512, keys, dtype=torch.bool) if "mask" in extras else None,
            bias=meta(1, HEADS, 512, keys, dtype=dtype) if "bias" in extras else None,
            thresholds=meta(8) if "gaps" in extras else None,
        )[0][0]  # fmt: skip

    structure = _two_sweeps(keys)._replace(trips_inside=8)
    return Variant("softmax", ", ".join((f"n = {keys}", *extras)), NAMES[dtype], 0, 0, structure, build)


def _softmax_backward(dtype: torch.dtype, keys: int, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.softmax.launch import backward_launches

        scores = meta(BATCH, HEADS, 512, keys, dtype=dtype)
        bias = meta(1, HEADS, 512, keys, dtype=dtype) if "bias" in extras else None
        given = scores if "dbeta" in extras else None
        return backward_launches(scores, scores, meta(BATCH, HEADS, 512), scores=given, bias=bias)[0][0]

    name = ", ".join((f"n = {keys}", *extras))
    return Variant("softmax backward", name, NAMES[dtype], 0, 0, _two_sweeps(keys), build)


def _two_sweeps(keys: int) -> Structure:
    """Loop structure of the softmax; rows that fit into one block have no loop."""
    return Structure(("hot",), sweeps=2) if keys > 8192 else Structure()


def _gaps() -> Iterator[Variant]:
    """The bracket of Λ, and counts at thresholds."""
    for dim, rule in ((64, "causal"), (128, "causal"), (128, "bias")):
        yield _gap_bracket(dim, rule)
    structure = Structure(phases_of("causal"), sweeps=2)
    yield Variant("gap count", "causal, 8 thresholds", "bf16", 128, 2, structure, _gap_count)


def _gap_bracket(dim: int, rule: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.gaps.launch import bracket_launches

        query, key, _ = heads_of(dim, torch.bfloat16)
        return bracket_launches(query, key, seen_by(rule), scale=SCALE)[0][0]

    structure = Structure(phases_of(rule, listed=False), sweeps=2)
    return Variant("gap bracket", f"{rule}, {BINS - 1} bins", "bf16", dim, 2, structure, build)


def _gap_count() -> Launch:
    from attnscale_kernels.gaps.launch import count_launches

    query, key, _ = heads_of(128, torch.bfloat16)
    return count_launches(query, key, seen_by("causal"), [0.1 * t for t in range(8)], scale=SCALE)[0][0]


def _decode() -> Iterator[Variant]:
    """One query against a cache, and the merge of its splits."""
    for dim, level in ((64, "plain"), (128, "plain"), (128, "entropy"), (256, "entropy")):
        yield _decode_kernel(0, dim, level)
    yield _decode_kernel(1, 128, "entropy")


def _decode_kernel(kernel: int, dim: int, level: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.decode.launch import decode_launches

        query, key, beta = heads_of(dim, torch.bfloat16, queries=1)
        last = Visibility(slot=LENGTH - 1, right=0)
        return decode_launches(
            query, key, key, beta, last, scale=SCALE, softcap=None, sinks=None, entropy=level == "entropy"
        )[0][kernel]

    structure = (Structure(phases_of("causal"), repairs=True), Structure(("hot",)))[kernel]
    return Variant(("decode split", "decode merge")[kernel], level, "bf16", dim, (2, 0)[kernel], structure, build)
