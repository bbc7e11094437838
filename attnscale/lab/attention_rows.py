"""Statistics of chosen rows of every attention of a model, while it reads a sequence in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale.backends.reference import raw_scores
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Run, Tap
from attnscale.diagnostics import find_attention
from attnscale.statistics import StatsRequest, row_statistics
from attnscale.statistics.gaps import accumulation_scales

RANKS = (2, 8, 16)  # Λ from these ranks on: the first ranks make it heavy-tailed
FIRST_KEYS = 4  # left out of "without_first": an attention sink lies there, and inflates Λ
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
    """The quantities [heads, rows, quantities] of one layer at these positions."""

    layer: str
    positions: list[int]
    values: Tensor


class ChosenRows:
    """Measures the rows at given positions of the sequence; `offset` is how much of it was read before this forward.

    It is the listener of its taps too: they ask whether it listens.
    """

    failed = False

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = sorted(set(positions))
        self.offset = 0
        self.listening = bool(self.positions)
        self.tables: list[RowTable] = []

    def tap(self, layer: str) -> Tap:
        """A tap for one layer."""

        def report(tap_id: Tensor, call: AttentionCall, run: Run) -> Tensor:
            self._measure(layer, call)
            return run(call)

        return Tap(self, report)  # type: ignore[arg-type]

    def _measure(self, layer: str, call: AttentionCall) -> None:
        chosen = [p for p in self.positions if self.offset <= p < self.offset + call.query.shape[2]]
        if not chosen:
            return
        rows = torch.tensor([p - self.offset for p in chosen], device=call.query.device)
        self.tables.append(RowTable(layer, chosen, measure_rows(call.detached().select(rows))))


@contextmanager
def listen_to_rows(model: nn.Module, positions: Sequence[int]) -> Iterator[ChosenRows]:
    """Measure rows of every attention of attnscale's in a model inside a `with` block."""
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


def measure_rows(call: AttentionCall) -> Tensor:
    """`QUANTITIES` [H, R, Q] of all rows of a call of one sequence, from their scores [H, R, n]."""
    scores, visible = raw_scores(call)[0], call.context.dense()
    shown = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible[0].expand_as(scores)
    beta = call.row_beta()[0].to(scores.dtype)
    stats = row_statistics(scores, beta, shown, StatsRequest(lse=False, max_logit=False))
    late = shown.clone()
    late[..., :FIRST_KEYS] = False
    scales = [scale for mask in (shown, late) for scale in accumulation_scales(scores, RANKS, mask)]
    criticality = beta / scales[RANKS.index(8)]
    columns = [stats.visible.to(scores.dtype), beta, stats.w_max, stats.entropy, *scales, criticality]
    return torch.stack(columns, dim=-1).cpu()
