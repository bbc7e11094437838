"""Alternative implementations of the statistics, kept so that the choice can be measured again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

ROWS, PER_HEAD = 512, 128


def flash_twice(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    """lse from torch's flash operator; entropy = lse − scale·⟨q, P·K⟩ from a second, with K as values. No maximum."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, is_causal)
    mean_key, _ = flash(query, key, key, 0.0, is_causal)
    lse - (query * mean_key).sum(-1) * query.shape[-1] ** -0.5
    result: Tensor = out
    return result


def softmax_per_tile(logits: Tensor) -> Tensor:
    """torch.softmax, then w_max = max p, lse = m − ln w_max, and Σ p·ℓ from both buffers."""
    weights = logits.softmax(-1)
    logits.amax(-1) - weights.amax(-1).log() - logits.mul_(weights).sum(-1)
    return weights


def exp_per_tile(logits: Tensor) -> Tensor:
    """The chain in use, with e^x in place of 2^x."""
    centred = logits.sub_(logits.amax(-1, keepdim=True))
    powers = centred.exp()
    total = powers.sum(-1, keepdim=True)
    centred.mul_(powers).sum(-1)
    return powers.div_(total)


def fused_chain(logits: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """The chain in one expression, for torch.compile, which vectorises e^x but not 2^x."""
    centred = logits - logits.amax(-1, keepdim=True)
    powers.copy_(torch.exp(centred))
    return powers.sum(-1, keepdim=True), (powers * centred).sum(-1, keepdim=True)


def compiled_per_tile(chain: Callable[..., tuple[Tensor, Tensor]], room: list[Tensor], logits: Tensor) -> Tensor:
    """The weights of a tile by the compiled chain; `room` keeps a buffer for the powers from tile to tile."""
    if not room or room[0].numel() < logits.numel():
        room[:] = [torch.empty(logits.numel(), device="cpu")]
    powers = room[0][: logits.numel()].view(logits.shape)
    total, _ = chain(logits, powers)
    return powers.div_(total)


def in_tiles(
    weigh: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> Tensor:
    """Attention in tiles of `ROWS` rows whose weights come from `weigh`; causal, one sequence."""
    heads, length, dim = query.shape[1:]
    together = ROWS // PER_HEAD
    query, key, value = (x[0] for x in (query * dim**-0.5, key, value))
    out, room = torch.empty_like(value), query.new_empty(together * PER_HEAD * length)
    for first in range(0, heads, together):
        part = slice(first, first + together)
        for top in range(0, length, PER_HEAD):
            bottom = min(top + PER_HEAD, length)
            shape = (query[part].shape[0], bottom - top, bottom)
            logits = room[: shape[0] * shape[1] * shape[2]].view(shape)
            torch.bmm(query[part, top:bottom], key[part, :bottom].mT, out=logits)
            hidden = torch.ones(bottom - top, bottom - top, dtype=torch.bool, device="cpu").triu(1)
            logits[..., top:].masked_fill_(hidden, -1e30)
            out[part, top:bottom] = torch.bmm(weigh(logits), value[part, :bottom])
    return out[None]


VARIANTS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "flash_twice": lambda: flash_twice,
    "tile_softmax": lambda: functools.partial(in_tiles, softmax_per_tile),
    "tile_exp": lambda: functools.partial(in_tiles, exp_per_tile),
    "tile_compiled": lambda: functools.partial(
        in_tiles, functools.partial(compiled_per_tile, torch.compile(fused_chain, dynamic=True), [])
    ),
}
