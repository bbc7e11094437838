"""The decoding kernels as providers: keys split over programs, in one cache or in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from attnscale.bench.gpu.problem import Problem
from attnscale.bench.gpu.provider import Answer, Attention, Provider, by_law

PAGE = 64


def split(problem: Problem) -> Attention:
    """A cache in one piece."""
    from attnscale_kernels import Visibility
    from attnscale_kernels.decode.op import decode_attention

    beta = problem.temperature()[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(decode_attention(query, key, value, beta, Visibility(), scale=problem.dim**-0.5).out)

    return attend


def paged(problem: Problem) -> Attention:
    """A cache in pages that lie in no order; putting it there is part of the first call, not of those that count."""
    from attnscale_kernels.decode.op import paged_decode_attention

    beta = problem.temperature()[None, None]
    pages = -(-problem.keys // PAGE)
    order = torch.randperm(problem.batch * pages, generator=torch.Generator().manual_seed(0))
    table = order.to(problem.device, torch.int32).view(problem.batch, pages)
    lengths = torch.full((problem.batch,), problem.keys, dtype=torch.int32, device=problem.device)
    caches: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        if not caches:
            caches[:] = [in_pages(x, table) for x in (key, value)]
        keys, values = caches
        return Answer(paged_decode_attention(query, keys, values, table, lengths, beta, scale=problem.dim**-0.5).out)

    return attend


def in_pages(cache: Tensor, table: Tensor) -> Tensor:
    """Keys or values [B, Hkv, Tk, D] as [pages, PAGE, Hkv, D], with page p of sequence b at `table[b, p]`."""
    _, heads, slots, dim = cache.shape
    padded = torch.nn.functional.pad(cache.transpose(1, 2), (0, 0, 0, 0, 0, -slots % PAGE))
    result = cache.new_empty(table.numel(), PAGE, heads, dim)
    result[table.flatten().long()] = padded.reshape(-1, PAGE, heads, dim)
    return result


DECODING = (
    Provider("attnscale_split", split, by_law, ours=True),
    Provider("attnscale_paged", paged, by_law, ours=True),
)
