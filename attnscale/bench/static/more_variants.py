"""Variants of the row softmax, of gap counting and of decoding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnscale.bench.static.variants import (
    BATCH,
    HEADS,
    KV_HEADS,
    LENGTH,
    NAMES,
    SCALE,
    Variant,
    heads_of,
    meta,
    seen_by,
)
from attnscale_kernels.launch import Launch
from attnscale_kernels.visibility import Visibility


def softmax_variants() -> Iterator[Variant]:
    """Rows in one block and in many, with what can be added."""
    yield _softmax_forward(torch.bfloat16, 1024)
    yield _softmax_forward(torch.bfloat16, 1024, "mask", "bias", "gaps")
    yield _softmax_forward(torch.bfloat16, 65536)
    yield _softmax_forward(torch.float32, 65536, "mask", "bias", "gaps", "in place")
    yield _softmax_backward(torch.bfloat16, 1024)
    yield _softmax_backward(torch.bfloat16, 1024, "dbeta")
    yield _softmax_backward(torch.bfloat16, 65536, "dbeta from scores", "bias")


def _softmax_forward(dtype: torch.dtype, keys: int, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.softmax.kernel import softmax_forward_launch

        return softmax_forward_launch(
            meta(BATCH, HEADS, 512, keys, dtype=dtype), meta(BATCH, HEADS, 512),
            mask=meta(BATCH, 1, 512, keys, dtype=torch.bool) if "mask" in extras else None,
            bias=meta(1, HEADS, 512, keys, dtype=dtype) if "bias" in extras else None,
            thresholds=meta(8) if "gaps" in extras else None, in_place="in place" in extras,
        )[0]  # fmt: skip

    return Variant("softmax", ", ".join((f"n = {keys}", *extras)), NAMES[dtype], 0, 0, build)


def _softmax_backward(dtype: torch.dtype, keys: int, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.softmax.kernel import softmax_backward_launch

        scores = meta(BATCH, HEADS, 512, keys, dtype=dtype)
        from_scores = "dbeta from scores" in extras
        return softmax_backward_launch(
            scores, scores, meta(BATCH, HEADS, 512), scores=scores if from_scores else None,
            bias=meta(1, HEADS, 512, keys, dtype=dtype) if "bias" in extras else None,
            dbeta=from_scores or "dbeta" in extras,
        )[0]  # fmt: skip

    return Variant("softmax backward", ", ".join((f"n = {keys}", *extras)), NAMES[dtype], 0, 0, build)


def gap_variants() -> Iterator[Variant]:
    """The bracket of Λ with few and many bins, and counts at thresholds."""
    for dim, bins, rule in ((64, 15, "causal"), (128, 7, "causal"), (128, 15, "causal"), (128, 15, "bias")):
        yield _gap_bracket(dim, bins, rule)
    yield Variant("gap count", "causal, 8 thresholds", "bf16", 128, 1, _gap_count)


def _gap_bracket(dim: int, bins: int, rule: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.gaps.kernel import bracket_launch

        query, key, _ = heads_of(dim, torch.bfloat16)
        return bracket_launch(query, key, seen_by(rule), scale=SCALE, softcap=None, bins=bins)[0]

    return Variant("gap bracket", f"{rule}, {bins} bins", "bf16", dim, 1, build)


def _gap_count() -> Launch:
    from attnscale_kernels.gaps.kernel import count_launch

    query, key, _ = heads_of(128, torch.bfloat16)
    return count_launch(query, key, seen_by("causal"), [0.1 * t for t in range(8)], scale=SCALE, softcap=None)[0]


def decode_variants() -> Iterator[Variant]:
    """One query against a cache: whole, in pages, its merge, and gap counts."""
    for dim, extras in ((64, ()), (128, ()), (128, ("entropy",)), (256, ("entropy",)), (128, ("paged", "entropy"))):
        yield _decode("split", 0, dim, *extras)
    yield _decode("merge", 1, 128, "entropy", "gaps")
    yield _decode("count", 2, 128, "entropy", "gaps")


def _decode(stage: str, index: int, dim: int, *extras: str) -> Variant:
    def build() -> Launch:
        from attnscale_kernels.decode.kernel import decode_launches, paged_decode_launches

        query, key, beta = heads_of(dim, torch.bfloat16, queries=1)
        entropy, thresholds = "entropy" in extras, meta(8) if "gaps" in extras else None
        if "paged" in extras:
            cache = meta(1024, 64, KV_HEADS, dim, dtype=torch.bfloat16)
            table, lengths = meta(BATCH, LENGTH // 64, dtype=torch.int32), meta(BATCH, dtype=torch.int32)
            return paged_decode_launches(
                query, cache, cache, table, lengths, beta, window=None, scale=SCALE, softcap=None, sinks=None,
                entropy=entropy, thresholds=thresholds,
            )[0][index]  # fmt: skip
        last = Visibility(slot=LENGTH - 1, right=0)
        return decode_launches(
            query, key, key, beta, last, scale=SCALE, softcap=None, sinks=None, entropy=entropy, thresholds=thresholds
        )[0][index]

    products = {"split": 2, "merge": 0, "count": 1}[stage]
    return Variant(f"decode {stage}", ", ".join(extras) or "plain", "bf16", dim, products, build)
