"""Statistics of chosen rows in every attention layer, while a model reads a sequence in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Listener, Run, Tap
from attnscale.diagnostics import find_attention
from attnscale.statistics import StatsRequest
from attnscale.statistics.gaps import HIDDEN, accumulation_scales
from attnscale.statistics.rows.attend import measure_statistics
from attnscale.statistics.rows.tiles import whole_row_scores

RANKS = (2, 8, 16)  # minimum ranks for Λ: the first ranks make Λ heavy-tailed
FIRST_KEYS = 4  # excluded from "without_first": an attention sink there inflates Λ
QUANTITIES = (
    "visible",
    "beta",
    "w_max",
    "entropy",
    *(f"accumulation_{rank}" for rank in RANKS),
    *(f"accumulation_{rank}_without_first" for rank in RANKS),
    "criticality",
)


Span = tuple[int, int]  # slots [first, last)


class RowTable(NamedTuple):
    """Quantities [heads, rows, quantities] of one layer at the given positions.

    `weights` [heads, rows] is the attention weight on the span of each row, if spans were given.
    """

    layer: str
    positions: list[int]
    values: Tensor
    weights: Tensor | None = None


class ChosenRows(Listener):
    """Measures the rows at given positions of a sequence; `offset` is the number of tokens read in earlier chunks.

    Rows are measured before the attention call runs, in the forward pass only. With `spans`, position → slots, the
    weight of each row on its span is measured too.
    """

    failed = False
    tracking = False
    limit = math.inf

    def __init__(self, positions: Sequence[int], spans: Mapping[int, Span] | None = None) -> None:
        self.positions = sorted(set(positions))
        self.spans = spans
        self.offset = 0
        self.listening = bool(self.positions)
        self.tables: list[RowTable] = []

    def begin(self, graph: bool) -> int:
        return 0  # calls need no identifiers

    def tap(self, layer: str) -> Tap:
        """Return a tap for one layer."""

        def report(tap_id: Tensor, call: AttentionCall, run: Run, measured: AttentionCall | None = None) -> Tensor:
            self._measure(layer, call if measured is None else measured)
            return run(call).out

        return Tap(self, report)

    def _measure(self, layer: str, call: AttentionCall) -> None:
        chosen = [p for p in self.positions if self.offset <= p < self.offset + call.query.shape[2]]
        if not chosen:
            return
        rows = torch.tensor([p - self.offset for p in chosen], device=call.query.device)
        part = call.detached().select(rows)
        weights = None if self.spans is None else measure_spans(part, [self.spans[p] for p in chosen])
        self.tables.append(RowTable(layer, chosen, measure_chosen_rows(part), weights))


@contextmanager
def measure_rows(
    model: nn.Module, positions: Sequence[int], spans: Mapping[int, Span] | None = None
) -> Iterator[ChosenRows]:
    """Measure rows in every attnscale attention layer of a model, inside a `with` block."""
    chosen = ChosenRows(positions, spans)
    attached: list[tuple[Tap, Any]] = []
    try:
        for path, module in find_attention(model).items():
            tap = chosen.tap(path)
            tap.attach(module)
            attached.append((tap, module))
        yield chosen
    finally:
        for tap, module in attached:
            tap.detach(module)


def measure_chosen_rows(call: AttentionCall) -> Tensor:
    """Return `QUANTITIES` [H, R, Q] of all rows of a call with one sequence."""
    stats = measure_statistics(call, StatsRequest(lse=False, max_logit=False))
    scales = stats.w_max.new_zeros(*stats.w_max.shape, 2 * len(RANKS))
    for rows, block, scores in whole_row_scores(call):
        of_all = accumulation_scales(scores, RANKS)
        scores[..., : max(0, FIRST_KEYS - block.left)] = HIDDEN
        rows.store(scales, block, torch.stack([*of_all, *accumulation_scales(scores, RANKS)], dim=-1))
    beta = call.row_beta().to(scales.dtype)
    criticality = beta / scales[..., RANKS.index(8)]
    columns = [stats.visible.to(scales.dtype), beta, stats.w_max, stats.entropy, *scales.unbind(-1), criticality]
    return torch.stack(columns, dim=-1)[0].cpu()


def measure_spans(call: AttentionCall, spans: Sequence[Span]) -> Tensor:
    """Return the weight [H, R] of each row of a call with one sequence on its span. Sinks are not counted."""
    weights = torch.zeros(call.query.shape[:3], device=call.query.device, dtype=torch.float32)
    bounds = torch.tensor(spans, device=call.query.device)  # [R, 2]
    for rows, block, scores in whole_row_scores(call):
        logits = scores * rows.rows_of(rows.beta, block)[..., None]
        slots = torch.arange(block.left, block.right, device=scores.device)
        first, last = bounds[block.top : block.bottom].T[..., None]
        inside = ((slots >= first) & (slots < last)).repeat(call.group, 1)  # [g·r, K]
        rows.store(weights, block, (logits.softmax(-1) * inside).sum(-1))
    return weights[0].cpu()
