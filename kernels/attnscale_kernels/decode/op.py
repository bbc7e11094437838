"""Decoding as operators that torch knows, for torch.compile and CUDA graphs. They are for inference: no gradients."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..derivatives import refuse_others
from ..visibility import Visibility
from .kernel import decode, paged_decode
from .merge import Decode


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    entropy: bool = False,
    thresholds: Tensor | None = None,
    splits: int | None = None,
) -> Decode:
    """`decode` as an operator."""
    refuse_others(query, key, value, beta, sinks, visibility.mask)
    found = decode_op(
        query,
        key,
        value,
        beta,
        visibility.start,
        visibility.stop,
        visibility.padding,
        visibility.mask,
        sinks,
        thresholds,
        visibility.slot,
        visibility.left,
        visibility.right,
        scale,
        softcap,
        entropy,
        splits,
    )
    return _asked_for(found, entropy, thresholds)


def paged_decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    beta: Tensor,
    *,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    entropy: bool = False,
    thresholds: Tensor | None = None,
    splits: int | None = None,
) -> Decode:
    """`paged_decode` as an operator."""
    refuse_others(query, key_cache, value_cache, beta, sinks)
    found = paged_decode_op(
        query, key_cache, value_cache, block_table, lengths, beta, sinks, thresholds, window, scale, softcap, entropy,
        splits,
    )  # fmt: skip
    return _asked_for(found, entropy, thresholds)


@torch.library.custom_op("attnscale_kernels::decode", mutates_args=())
def decode_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    padding: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    thresholds: Tensor | None,
    slot: int,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    entropy: bool,
    splits: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, and lse, largest logit, entropy and gap counts per row; the last two empty where not asked for."""
    visibility = Visibility(slot, left, right, start, stop, padding, mask)
    found = decode(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, entropy=entropy,
        thresholds=thresholds, splits=splits,
    )  # fmt: skip
    return _all_tensors(found)


@torch.library.custom_op("attnscale_kernels::paged_decode", mutates_args=())
def paged_decode_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    beta: Tensor,
    sinks: Tensor | None,
    thresholds: Tensor | None,
    window: int | None,
    scale: float,
    softcap: float | None,
    entropy: bool,
    splits: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `decode_op`, from pages."""
    found = paged_decode(
        query, key_cache, value_cache, block_table, lengths, beta, window=window, scale=scale, softcap=softcap,
        sinks=sinks, entropy=entropy, thresholds=thresholds, splits=splits,
    )  # fmt: skip
    return _all_tensors(found)


@decode_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _fake(arguments[0], arguments[2], arguments[15], arguments[9])


@paged_decode_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return _fake(arguments[0], arguments[2], arguments[11], arguments[7])


def _fake(query: Tensor, value: Tensor, entropy: bool, thresholds: Tensor | None) -> tuple[Tensor, ...]:
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    counts = (0,) if thresholds is None else (*query.shape[:3], thresholds.shape[0])
    return (
        query.new_empty(*query.shape[:3], value.shape[-1]),
        rows,
        torch.empty_like(rows),
        torch.empty_like(rows) if entropy else rows.new_empty(0),
        rows.new_empty(counts, dtype=torch.int64),
    )


def _all_tensors(found: Decode) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = found.lse
    entropy = rows.new_empty(0) if found.entropy is None else found.entropy
    counts = rows.new_empty(0, dtype=torch.int64) if found.gap_counts is None else found.gap_counts
    return found.out, rows, found.max_logit, entropy, counts


def _asked_for(found: tuple[Tensor, ...], entropy: bool, thresholds: Tensor | None) -> Decode:
    out, lse, top, disorder, counts = found
    return Decode(out, lse, top, disorder if entropy else None, None if thresholds is None else counts)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Called in place of saving tensors for a backward pass, that is when an input requires a gradient."""
    raise RuntimeError("decoding has no gradient: call it under torch.no_grad(), or use flash_attention")


for _op in (decode_op, paged_decode_op):
    _op.register_autograd(_refuse, setup_context=_refuse)
