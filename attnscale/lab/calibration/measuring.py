"""Λ of chosen rows in every layer and head, and the weight of each head on the answer: one cell per sequence.

Everything is measured with β = 1: on rows of the text near a length, and on the rows that predict an answer in prompts
with known answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale.lab.attention_rows import QUANTITIES, ChosenRows, Span, measure_rows
from attnscale.lab.calibration.reading import Sequence
from attnscale.lab.tasks import stream

# Rows per length of a text, in its last eighth: n is then close to the length.
ROWS = 16
NEAR = 8

# The quantities that are stored for every row.
SCALES = tuple(name for name in QUANTITIES if name.startswith("accumulation"))

TEXT, PROMPTS = "text", "prompts"


def scale_name(rank: int, first_keys: bool) -> str:
    """Return the name of Λ with a minimum rank, with or without the first keys.

    >>> scale_name(8, False)
    'accumulation_8_without_first'
    """
    return f"accumulation_{rank}" + ("" if first_keys else "_without_first")


class Place(NamedTuple):
    """One attention head."""

    layer: str
    head: int


@dataclass
class Measured:
    """The measurements of one head on one kind of sequence.

    Attributes:
        scales: quantity → length → Λ of each sequence, [R] per sequence.
        weights: length → weight of each sequence on the answers, [R]; empty for text.
        w_max: length → largest weight of each sequence, [R].
    """

    scales: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    weights: dict[int, list[Tensor]] = field(default_factory=dict)
    w_max: dict[int, list[Tensor]] = field(default_factory=dict)


@torch.inference_mode()
def measure_text(model: nn.Module, tokens: Tensor, lengths: tuple[int, ...], chunk: int) -> dict[str, Any]:
    """Return Λ of rows near each length, from one pass over a text [T]."""
    rows = {length: _near(length) for length in lengths}
    with measure_rows(model, sorted({row for some in rows.values() for row in some})) as measured:
        _read(model, tokens[: max(lengths)], chunk, measured)
    return {str(length): _entries(measured, set(some)) for length, some in rows.items()}


@torch.inference_mode()
def measure_prompt(model: nn.Module, prompt: Sequence, chunk: int) -> dict[str, Any]:
    """Return Λ of the rows that predict an answer, and their weight on the needle that holds it."""
    rows = (prompt.answers[:, 0] - 1).tolist()
    spans: dict[int, Span] = {
        row: (start, stop) for row, (start, stop) in zip(rows, prompt.needles.tolist(), strict=True)
    }
    with measure_rows(model, rows, spans) as measured:
        _read(model, prompt.tokens[: max(rows) + 1], chunk, measured)
    return {str(len(prompt.tokens)): _entries(measured, set(rows))}


def collect(results: Iterable[Mapping[str, Any]]) -> dict[Place, Measured]:
    """Return the measurements of each head, from the cells of one kind."""
    found: dict[Place, Measured] = {}
    for result in results:
        for length, layers in result.items():
            for layer, columns in layers.items():
                for head in range(len(columns["w_max"])):
                    own = found.setdefault(Place(layer, head), Measured())
                    for name in SCALES:
                        by_length = own.scales.setdefault(name, {})
                        by_length.setdefault(int(length), []).append(_tensor(columns[name][head]))
                    own.w_max.setdefault(int(length), []).append(_tensor(columns["w_max"][head]))
                    if "weights" in columns:
                        own.weights.setdefault(int(length), []).append(_tensor(columns["weights"][head]))
    return found


def grid(first: int, last: int, per_doubling: int = 2) -> tuple[int, ...]:
    """Return a geometric grid of lengths, multiples of 4, from the first to the last.

    >>> grid(128, 512)
    (128, 180, 256, 360, 512)
    """
    steps = max(1, round(per_doubling * math.log2(last / first)))
    return tuple(sorted({4 * int(first * (last / first) ** (step / steps) / 4) for step in range(steps + 1)}))


def _read(model: nn.Module, tokens: Tensor, chunk: int, measured: ChosenRows) -> None:
    """Run a model over a sequence without computing logits."""
    nothing = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    for _ in stream(model, tokens, chunk, nothing, measured):
        pass


def _near(length: int) -> list[int]:
    start = length - max(1, length // NEAR)
    return sorted({start + (2 * i + 1) * (length - start) // (2 * ROWS) for i in range(ROWS)})


def _entries(measured: ChosenRows, wanted: set[int]) -> dict[str, Any]:
    """Return layer → quantity → [head][row] as plain numbers."""
    layers: dict[str, dict[str, list[Tensor]]] = {}
    for table in measured.tables:
        inside = [i for i, position in enumerate(table.positions) if position in wanted]
        if not inside:
            continue
        columns = layers.setdefault(table.layer, {})
        for name in (*SCALES, "w_max"):
            columns.setdefault(name, []).append(table.values[:, inside, QUANTITIES.index(name)])
        if table.weights is not None:
            columns.setdefault("weights", []).append(table.weights[:, inside])
    return {
        layer: {name: _plain(torch.cat(parts, 1)) for name, parts in columns.items()}
        for layer, columns in layers.items()
    }


def _plain(values: Tensor) -> list[list[float]]:
    known = values.double().nan_to_num(0.0, 1e30, 0.0).tolist()
    return [[float(f"{value:.5g}") for value in row] for row in known]


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
