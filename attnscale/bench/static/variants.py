"""All kernels that can be launched, by family: what the table has rows for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from attnscale.bench.static.flash_variants import backward_variants, forward_variants, mask_variants
from attnscale.bench.static.phases import Structure
from attnscale.bench.static.table import REFERENCE
from attnscale.bench.static.variant import (
    BATCH,
    HEADS,
    LENGTH,
    NAMES,
    SCALE,
    Variant,
    heads_of,
    meta,
    phases_of,
    seen_by,
)
from attnscale_kernels.launch import Launch
from attnscale_kernels.visibility import Visibility


def variants() -> list[Variant]:
    """All of them, in the order of the table."""
    flash = [*forward_variants(), *_reference(), *backward_variants(), *mask_variants()]
    return [*flash, *_softmax(), *_gaps(), *_decode()]


def _reference() -> Iterator[Variant]:
    """The plain kernel that the forward is held against."""
    for dim in (64, 128):
        yield Variant(REFERENCE, "causal, plain", "bf16", dim, 2, Structure(("hot", "after")), _plain_forward(dim))


def _plain_forward(dim: int) -> Callable[[], Launch]:
    def build() -> Launch:
        from attnscale.bench.static.reference_launch import reference_launches

        query = meta(BATCH, HEADS, LENGTH, dim, dtype=torch.bfloat16)
        return reference_launches(query, query, query, scale=SCALE)[0][0]

    return build


def _softmax() -> Iterator[Variant]:
    """Rows in one block and in many, with each flag."""
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
    """Of a row that is too long for one block; a shorter one has no loop."""
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
    return Variant("gap bracket", f"{rule}, 15 bins", "bf16", dim, 2, structure, build)


def _gap_count() -> Launch:
    from attnscale_kernels.gaps.launch import count_launches

    query, key, _ = heads_of(128, torch.bfloat16)
    return count_launches(query, key, seen_by("causal"), [0.1 * t for t in range(8)], scale=SCALE)[0][0]


def _decode() -> Iterator[Variant]:
    """One query against a cache, and the merge of its parts."""
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
