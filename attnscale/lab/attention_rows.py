"""Statistics of chosen rows in every attention layer, while a model reads a sequence in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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


class RowTable(NamedTuple):
    """Quantities [heads, rows, quantities] of one layer at the given positions."""

    layer: str
    positions: list[int]
    values: Tensor


class ChosenRows(Listener):
    """Measures the rows at given positions of a sequence; `offset` is the number of tokens read in earlier chunks.

    Rows are measured before the attention call runs, in the forward pass only.
    """

    failed = False
    tracking = False
    limit = math.inf

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = sorted(set(positions))
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
        self.tables.append(RowTable(layer, chosen, measure_chosen_rows(call.detached().select(rows))))


@contextmanager
def measure_rows(model: nn.Module, positions: Sequence[int]) -> Iterator[ChosenRows]:
    """Measure rows in every attnscale attention layer of a model, inside a `with` block."""
    chosen = ChosenRows(positions)
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
