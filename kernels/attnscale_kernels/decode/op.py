"""Decoding as an operator of torch.library, for torch.compile and CUDA graphs. For inference: it has no gradient."""

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
    """`decode` as an operator."""
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
    """Output, and lse, largest logit, entropy and winner per row; the last two empty where not asked for."""
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
    """Called in place of saving tensors for a backward pass, that is when an input requires a gradient."""
    raise RuntimeError("decoding has no gradient: call it under torch.no_grad(), or use flash_attention")


decode_op.register_autograd(_refuse, setup_context=_refuse)
