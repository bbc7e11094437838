"""Decode attention as a torch.library operator, for torch.compile and CUDA graphs. Inference only."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ..arguments import check_attention, check_numbers, check_splits
from ..availability import refuse_others
from ..errors import reject_type
from ..launch import Forward, new_forward, run
from ..operators import FLAT_ATTENTION, FlatAttention, is_eager, needs_gradient, operator
from ..visibility import Visibility
from .launch import decode, decode_launches


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
    winner: bool = False,
    splits: int | None = None,
) -> Forward:
    """`flash_attention` for a few queries against a long KV cache, split over the keys. Inference only.

    Args:
        query: [B, H, Tq, D] in fp32, fp16 or bf16. Intended for Tq ≤ 16, correct for any Tq.
        key: The key cache [B, Hkv, Tk, D]; Hkv divides H.
        value: The value cache [B, Hkv, Tk, DV].
        beta: The temperatures, any shape that broadcasts to [B, H, Tq].
        visibility: The keys that each row may see, and an additive mask (bias).
        scale: Factor of q·k.
        softcap: c for c·tanh(scale·q·k / c), or None.
        sinks: Attention sink logits [H], not scaled by β, or None.
        entropy: Also return the entropy of each row.
        winner: Also return the slot of the largest logit of each row.
        splits: Number of parts the keys are divided into; None chooses it for the device.

    Returns:
        A `Forward` with the output [B, H, Tq, DV] and the statistics of each row.

    Raises:
        KernelArgumentError: An argument has an unsupported shape, device or value.
        KernelTypeError: An argument has an unsupported type, dtype or layout.
        KernelUnavailableError: Triton does not support the device.
        RuntimeError: An input requires a gradient, or another derivative is being taken.

    Example:
        >>> import torch
        >>> from attnscale_kernels import interpreting
        >>> device = "cpu" if interpreting() else "cuda"
        >>> q = torch.randn(1, 4, 1, 16, device=device)
        >>> k, v = (torch.randn(1, 2, 100, 16, device=device) for _ in range(2))
        >>> found = decode_attention(q, k, v, torch.ones(1, device=device), Visibility(slot=99, right=0), scale=0.25)
        >>> found.out.shape, found.lse.shape
        (torch.Size([1, 4, 1, 16]), torch.Size([1, 4, 1]))
    """
    if not isinstance(visibility, Visibility):
        reject_type("visibility", visibility, "a Visibility")
    tensors: tuple[Tensor, ...] = (query, key, value, beta)
    if sinks is not None:
        tensors += (sinks,)
    if visibility.mask is not None:
        tensors += (visibility.mask,)
    if is_eager(*tensors) and not needs_gradient(*tensors):
        made = decode_launches(
            query, key, value, beta, visibility, scale=scale, softcap=softcap, sinks=sinks, entropy=entropy,
            winner=winner, splits=splits,
        )  # fmt: skip
        return run(made, query)
    check_attention(query, key, value, beta, visibility, sinks)
    check_numbers(scale, softcap)
    check_splits(splits)
    refuse_others(*tensors)
    flat = FlatAttention.of(query, key, value, beta, visibility, sinks, scale=scale, softcap=softcap)
    out, lse, top, disorder, slots = decode_op(*flat, entropy, winner, splits)
    return Forward(out, lse, top, disorder if entropy else None, slots if winner else None)


@operator(
    "decode",
    schema=f"({FLAT_ATTENTION}, bool entropy, bool winner, SymInt? splits) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def decode_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output, lse, largest logit, entropy and winner; the last two are empty if not requested."""
    flat, (entropy, winner, splits) = FlatAttention.split(arguments)
    return decode(
        *flat.tensors, scale=flat.scale, softcap=flat.softcap, sinks=flat.sinks, entropy=entropy, winner=winner,
        splits=splits,
    ).outputs()  # fmt: skip


@decode_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    flat, (entropy, winner, _) = FlatAttention.split(arguments)
    check_attention(*flat.tensors, flat.sinks)
    return new_forward(flat.query, flat.value.shape[-1], entropy=entropy, winner=winner).outputs()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Called instead of saving tensors for a backward pass, that is, if an input requires a gradient."""
    raise RuntimeError("decode_attention has no gradient: call it under torch.no_grad(), or use flash_attention")


decode_op.register_autograd(_refuse, setup_context=_refuse)
