"""A forward of a long sequence in chunks: the cache carries what was read, so that no n × n matrix exists."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.lab.attention_rows import ChosenRows

# Logits of a chunk hold at most so many numbers: a quarter of a gigabyte in fp32.
MOST_LOGITS = 2**26


def stream(
    model: nn.Module, tokens: Tensor, chunk: int, wanted: Tensor | None = None, listener: ChosenRows | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions [R] and their logits [R, vocabulary] in fp32, chunk by chunk, of a sequence [T].

    `wanted` [T] says which positions; None is all of them.
    """
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    chunk = min(chunk, max(1, MOST_LOGITS // head.shape[0])) if wanted is None else chunk
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    cache = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows = (
            torch.arange(len(part), device="cpu")
            if wanted is None
            else wanted[start : start + len(part)].nonzero()[:, 0]
        )
        if listener is not None:
            listener.offset = start
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": len(part) < len(tokens)}
        if keeps:
            options["logits_to_keep"] = rows if len(rows) else torch.tensor([0], device="cpu")
        out = model(part[None].to(head.device), **options)
        cache = out.past_key_values if options["use_cache"] else None
        if len(rows):
            logits = out.logits[0] if keeps else out.logits[0, rows]
            yield start + rows, logits.float().cpu()
