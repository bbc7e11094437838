"""Perplexity of a transformers language model under temperature policies, by how much context a token has."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnscale.bench.rows import write_rows
from attnscale.errors import reject

# Logits of this many rows at once: with 49152 words a gigabyte holds 5000 rows.
_ROWS = 512


class Loss(NamedTuple):
    """Nats summed over so many predicted tokens."""

    nats: float
    tokens: int


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio_to_constant` compares with β = 1 and the model's own RoPE at this context."""

    policy: str
    parameters: str
    rope: str
    context: int
    windows: int
    tokens: int
    nats_per_token: float
    perplexity: float
    ratio_to_constant: float


@torch.inference_mode()
def losses(model: nn.Module, tokens: Tensor, contexts: Sequence[int]) -> dict[int, Loss]:
    """What the second half of each context costs: rows that see more than half of it and at most all.

    tokens [B, T + 1] with T the longest context. A causal model needs one forward for all contexts: its first rows do
    not know what comes later. The logits must be the output embedding of the last hidden state, as Llama's are.
    """
    longest = tokens.shape[1] - 1
    if not contexts or min(contexts) < 2 or max(contexts) > longest:
        reject("contexts", tuple(contexts), f"lengths from 2 to {longest}, one less than there are tokens")
    hidden = model.base_model(tokens[:, :-1], use_cache=False).last_hidden_state  # type: ignore[operator]
    head, targets = model.get_output_embeddings(), tokens[:, 1:]  # type: ignore[operator]
    found = {}
    for context in contexts:
        rows, nats = range(context // 2, context), 0.0
        for start in rows[::_ROWS]:
            part = slice(start, min(start + _ROWS, context))
            logits = head(hidden[:, part]).flatten(0, 1).float()
            nats += cross_entropy(logits, targets[:, part].flatten(), reduction="sum").item()
        found[context] = Loss(nats, tokens.shape[0] * len(rows))
    return found


def rows_of(
    policy: str,
    parameters: Mapping[str, Any],
    rope: str,
    windows: Sequence[Mapping[int, Loss]],
    base: Mapping[int, float] | None = None,
) -> list[Row]:
    """The lines of one setting from the losses of its windows; `base` has the nats per token that it is compared with.

    >>> half = Loss(nats=1024 * 3.0, tokens=1024)
    >>> (row,) = rows_of("log", {"reference_length": 8192}, "own", [{2048: half}, {2048: half}], {2048: 2.5})
    >>> row.tokens, row.nats_per_token, round(row.ratio_to_constant, 4)
    (2048, 3.0, 1.6487)
    """
    rows = []
    for context in windows[0]:
        tokens = sum(window[context].tokens for window in windows)
        nats = sum(window[context].nats for window in windows) / tokens
        ratio = 1.0 if base is None else math.exp(nats - base[context])
        given = json.dumps(parameters, sort_keys=True)
        rows.append(Row(policy, given, rope, context, len(windows), tokens, nats, math.exp(nats), ratio))
    return rows


def write_table(path: str | Path, rows: Iterable[Row]) -> None:
    """Write all lines as CSV, or leave an earlier file as it was."""
    write_rows(path, rows, Row, digits=6)


def read_table(path: str | Path) -> list[Row]:
    """The lines of a table that was written before; none where there is no file."""
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="", encoding="utf-8") as file:
        return [
            Row(
                policy=line["policy"],
                parameters=line["parameters"],
                rope=line["rope"],
                context=int(line["context"]),
                windows=int(line["windows"]),
                tokens=int(line["tokens"]),
                nats_per_token=float(line["nats_per_token"]),
                perplexity=float(line["perplexity"]),
                ratio_to_constant=float(line["ratio_to_constant"]),
            )
            for line in csv.DictReader(file)
        ]
