"""Gap counting as torch.library operators, and adaptive attention built on them. Counts have no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_numbers, check_scores, check_values, finite, numbers, positive
from ..errors import reject, reject_type
from ..flash.op import flash_attention
from ..launch import Forward
from ..operators import FLAT_SCORES, operator
from ..visibility import Visibility
from .launch import GapBracket, gap_bracket, gap_count


def accumulation_bracket(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
) -> GapBracket:
    """Bracket the accumulation scale Λ = max ln k/Δ_k of each row without a score matrix.

    Δ_k is the gap between the best and the k-th best raw score softcap(scale·q·k) + bias, over ranks k ≥ 2.

    Args:
        query: [B, H, Tq, D] in fp32, fp16 or bf16.
        key: [B, Hkv, Tk, D]; Hkv divides H.
        visibility: The keys that each row may see, and an additive mask (bias).
        scale: Factor of q·k.
        softcap: c for c·tanh(scale·q·k / c), or None.

    Returns:
        A `GapBracket` with the best raw score, the gap of the second-best, and lower ≤ Λ ≤ upper, each [B, H, Tq].

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.

    Example:
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> q, k = (torch.randn(1, 1, 8, 16, device=device) for _ in range(2))
        >>> found = accumulation_bracket(q, k, Visibility(right=0), scale=0.25)
        >>> bool((found.lower <= found.upper).all())
        True
    """
    return GapBracket(*gap_bracket_op(*_arguments(query, key, visibility, scale, softcap)))


def gap_counts(
    query: Tensor,
    key: Tensor,
    visibility: Visibility,
    thresholds: Sequence[float],
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Count, per row, the visible keys with a raw score within t of the best, for each threshold t.

    Args:
        query: [B, H, Tq, D] in fp32, fp16 or bf16.
        key: [B, Hkv, Tk, D]; Hkv divides H.
        visibility: The keys that each row may see, and an additive mask (bias).
        thresholds: The values of t; ∞ counts all visible keys.
        scale: Factor of q·k.
        softcap: c for c·tanh(scale·q·k / c), or None.

    Returns:
        N(t) [B, H, Tq, thresholds] in int32. The best key itself counts.

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.

    Example:
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> q, k = (torch.randn(1, 1, 3, 16, device=device) for _ in range(2))
        >>> gap_counts(q, k, Visibility(right=0), [0.0, float("inf")], scale=0.25)[..., 1].tolist()
        [[[1, 2, 3]]]
    """
    given = _arguments(query, key, visibility, scale, softcap)
    counts: Tensor = gap_count_op(*given, numbers("thresholds", thresholds))
    return counts


def adaptive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    *,
    r: float,
    floor: float,
    ceiling: float,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    entropy: bool = False,
) -> tuple[Forward, Tensor]:
    """`flash_attention` with β = r·Λ per row, clamped to [floor, ceiling].

    Λ is the upper end of its bracket, so r > 1 guarantees w_max ≥ 1/ζ(r) for rows below the ceiling. Ties at the top
    get the ceiling, rows with fewer than two keys the floor. β is treated as a constant in the backward pass.

    Args:
        query: [B, H, Tq, D] in fp32, fp16 or bf16.
        key: [B, Hkv, Tk, D]; Hkv divides H.
        value: [B, Hkv, Tk, DV].
        visibility: The keys that each row may see, and an additive mask (bias).
        r: The target criticality β/Λ, > 0.
        floor: The smallest β.
        ceiling: The largest β.
        scale: Factor of q·k.
        softcap: c for c·tanh(scale·q·k / c), or None.
        sinks: Attention sink logits [H], not scaled by β, or None.
        dropout_p: Dropout probability of the weights. Requires `seed` if > 0.
        seed: int64 scalar on the device of the query.
        entropy: Also return the entropy of each row.

    Returns:
        The `Forward` of `flash_attention`, and β [B, H, Tq] in fp32.

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.

    Example:
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> q, k, v = (torch.randn(1, 1, 8, 16, device=device) for _ in range(3))
        >>> _, beta = adaptive_attention(q, k, v, Visibility(right=0), r=2.0, floor=1.0, ceiling=64.0, scale=0.25)
        >>> beta.shape, beta[0, 0, 0].item()
        (torch.Size([1, 1, 8]), 1.0)
    """
    r, floor, ceiling = positive("r", r), finite("floor", floor), finite("ceiling", ceiling)
    if floor > ceiling:
        reject("floor", floor, f"at most ceiling={ceiling!r}")
    given = _arguments(query, key, visibility, scale, softcap)
    check_values(query, key, value, sinks, seed)
    check_numbers(scale, softcap, dropout_p)
    found = GapBracket(*gap_bracket_op(*given))
    beta = (r * found.upper).clamp(floor, ceiling)
    forward = flash_attention(
        query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, seed=seed,
        entropy=entropy,
    )  # fmt: skip
    return forward, beta


@operator("gap_bracket", schema=f"({FLAT_SCORES}) -> (Tensor, Tensor, Tensor, Tensor)")
def gap_bracket_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best raw score, the gap of the second-best, and the two bounds of Λ, per row."""
    query, key, *visibility, scale, softcap = arguments
    found = gap_bracket(query, key, Visibility(*visibility), scale=scale, softcap=softcap)
    return found.top, found.second_gap, found.lower, found.upper


@gap_bracket_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, *visibility, _, _ = arguments
    check_scores(query, key, Visibility(*visibility))
    return tuple(query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(4))


@operator("gap_count", schema=f"({FLAT_SCORES}, float[] thresholds) -> Tensor")
def gap_count_op(*arguments: Any) -> Tensor:
    """Return N(t) per row and threshold."""
    query, key, *visibility, scale, softcap, thresholds = arguments
    return gap_count(query, key, Visibility(*visibility), thresholds, scale=scale, softcap=softcap)


@gap_count_op.register_fake
def _(*arguments: Any) -> Tensor:
    query, key, *visibility, _, _, thresholds = arguments
    check_scores(query, key, Visibility(*visibility))
    counts: Tensor = query.new_empty((*query.shape[:3], len(thresholds)), dtype=torch.int32)
    return counts


def _arguments(
    query: Tensor, key: Tensor, visibility: Visibility, scale: float, softcap: float | None
) -> tuple[Any, ...]:
    """Check and detach the leading arguments of both operators."""
    if not isinstance(visibility, Visibility):
        reject_type("visibility", visibility, "a Visibility")
    check_scores(query, key, visibility)
    check_numbers(scale, softcap)
    mask = None if visibility.mask is None else visibility.mask.detach()
    return query.detach(), key.detach(), *visibility._replace(mask=mask), scale, softcap
