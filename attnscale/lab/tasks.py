"""What a cell computes: a forward in chunks with the cache, and the answers, losses and statistics read off it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from attnscale.errors import reject
from attnscale.lab.attention_rows import QUANTITIES, ChosenRows, listen_to_rows
from attnscale.lab.needles import Retrieval

# Logits of a chunk hold at most so many numbers: a quarter of a gigabyte in fp32.
MOST_LOGITS = 2**26

# Rows measured per length where no question says which rows matter.
ROWS = 16


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


def seeded(*parts: object) -> Generator:
    """A generator for a cell: the same for all policies and models, so that differences between them are paired."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def windows_of(tokens: Tensor, length: int, number: int) -> list[Tensor]:
    """`number` pieces of length + 1 tokens, evenly spread over a text [N]; overlapping ones are refused."""
    if len(tokens) < number * (length + 1):
        reject(
            "text",
            f"{len(tokens)} tokens",
            f"at least {number * (length + 1)}, for {number} windows of {length} tokens that do not overlap",
        )
    stride = (len(tokens) - length - 1) / max(1, number - 1)
    return [tokens[round(i * stride) : round(i * stride) + length + 1] for i in range(number)]


@torch.inference_mode()
def read_window(
    model: nn.Module, window: Tensor, lengths: Sequence[int], size: Callable[[Tensor], int], chunk: int
) -> dict[str, Any]:
    """Nats and bytes between the edges of the lengths, in one forward of a window [T + 1].

    `size` tells the bytes of consecutive tokens. A length's own figure is that of its second half.
    """
    edges = sorted({0, *(length // 2 for length in lengths), *lengths})
    inputs, targets = window[:-1], window[1:]
    nats = torch.zeros(len(inputs), dtype=torch.float64, device="cpu")
    rows = {length: _spread(length // 2, length) for length in lengths}
    with listen_to_rows(model, [position for some in rows.values() for position in some]) as listener:
        for positions, logits in stream(model, inputs, chunk, listener=listener):
            nats[positions] = cross_entropy(logits, targets[positions], reduction="none").double()
    bins = [
        {"start": a, "stop": b, "nats": nats[a:b].sum().item(), "bytes": size(targets[a:b])}
        for a, b in itertools.pairwise(edges)
    ]
    return {"bins": bins, "statistics": {str(length): medians(listener, some) for length, some in rows.items()}}


@torch.inference_mode()
def answer_questions(model: nn.Module, retrieval: Retrieval, chunk: int) -> dict[str, Any]:
    """Which questions of a sequence are answered, every token of an answer the most likely one, in one forward.

    Teacher-forced: the tokens before the one in question are always the right ones.
    """
    tokens, answers = retrieval.tokens, retrieval.answers
    asked = answers >= 0
    wanted = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    wanted[answers[asked] - 1] = True
    right = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    rows = (answers[:, 0] - 1).tolist()
    with listen_to_rows(model, rows) as listener:
        for positions, logits in stream(model, tokens[:-1], chunk, wanted[:-1], listener):
            right[positions + 1] = logits.argmax(-1) == tokens[positions + 1]
    correct = (right[answers.clamp(min=0)] | ~asked).all(1)
    return {
        "correct": correct.int().tolist(),
        "depths": [round(depth, 6) for depth in retrieval.depths.tolist()],
        "statistics": medians(listener, rows),
    }


def recall_sequence(length: int, num_kv_pairs: int, vocabulary: Sequence[int], generator: Generator) -> Retrieval:
    """Multi-query associative recall (arXiv:2312.04927): pairs of key and value first, then each key again, spread out.

    Keys are of the first half of the vocabulary, values of the second; the value after a repeated key is the answer.
    """
    half = len(vocabulary) // 2
    if not 1 <= num_kv_pairs <= half or 4 * num_kv_pairs > length:
        reject("num_kv_pairs", num_kv_pairs, f"1 to {min(half, length // 4)} at input_seq_len={length}")
    symbols = torch.tensor(list(vocabulary), device="cpu")
    keys = symbols[torch.randperm(half, generator=generator, device=generator.device)[:num_kv_pairs]]
    values = symbols[
        half + torch.randint(len(vocabulary) - half, (num_kv_pairs,), generator=generator, device=generator.device)
    ]
    tokens = symbols[torch.randint(len(vocabulary), (length,), generator=generator, device=generator.device)]
    pairs = torch.stack([keys, values], -1)
    tokens[: 2 * num_kv_pairs] = pairs.flatten()
    slots = torch.randperm((length - 2 * num_kv_pairs) // 2, generator=generator, device=generator.device)[
        :num_kv_pairs
    ]
    places = 2 * num_kv_pairs + 2 * slots.sort().values
    order = torch.randperm(num_kv_pairs, generator=generator, device=generator.device)
    tokens[places], tokens[places + 1] = keys[order], values[order]
    return Retrieval(tokens, (places + 1)[:, None], 2 * order / length)


def medians(listener: ChosenRows, positions: Sequence[int]) -> list[dict[str, Any]]:
    """For each layer and head the medians of the quantities over the rows at these positions."""
    wanted, layers = set(positions), list(dict.fromkeys(table.layer for table in listener.tables))
    found = []
    for layer in layers:
        parts = []
        for table in listener.tables:
            inside = [i for i, position in enumerate(table.positions) if position in wanted]
            if table.layer == layer and inside:
                parts.append(table.values[:, inside])
        if not parts:
            continue
        values = torch.cat(parts, 1)  # [H, R, Q]
        for head, row in enumerate(values.double().nan_to_num(0.0, 1e30, -1e30).quantile(0.5, dim=1).tolist()):
            rounded = {name: float(f"{value:.6g}") for name, value in zip(QUANTITIES, row, strict=True)}
            found.append({"layer": layer, "head": head, "rows": values.shape[1], **rounded})
    return found


def _spread(start: int, stop: int) -> list[int]:
    return sorted({start + (2 * i + 1) * (stop - start) // (2 * ROWS) for i in range(ROWS)})
