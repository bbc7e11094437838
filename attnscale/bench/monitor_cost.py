"""What it costs to watch a training: steps of a small GPT with a monitor, without one, and with n × n matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnscale.attention import attention_weights
from attnscale.bench.gpt import Gpt, build_gpt
from attnscale.bench.memory import peak_bytes
from attnscale.bench.ratio import Spread, in_both_roles, interleaved_ratio
from attnscale.bench.rows import Row
from attnscale.bench.steps import label
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.rows import MIN_RANK, THRESHOLDS
from attnscale.gaps import bracket_accumulation, count_gaps
from attnscale.policies import Policy, build_policy

# How a training is watched: the monitor's cadence, and how many steps are measured at a time.
WATCHED = {"every_1": (1, 1), "every_10": (10, 10), "not_this_step": (10**9, 1)}


@dataclass(frozen=True)
class MonitorCost:
    """A training step with forward, backward and optimizer under a monitor of 64 rows, over the same without one."""

    name: str
    length: int
    rounds: int

    def measure(self) -> list[Row]:
        ratio = in_both_roles(self._ratio, build_gpt(), build_gpt())
        labels = label(4, 64)
        return [Row("monitor", self.name, "training step", "time_ratio", self.length, *ratio, *labels)]

    def _ratio(self, model: Gpt, other: Gpt) -> Spread:
        every, steps = WATCHED[self.name]
        monitor = Monitor(model, every=every, rows=64, alerts=None)
        # A monitor listens to the step it was made in; the steps that are measured come after.
        watched, plain = training(model, self.length, monitor), training(other, self.length)
        watched()
        ratio = interleaved_ratio(_times(watched, steps), _times(plain, steps), self.rounds)
        monitor.close()
        return ratio


@dataclass(frozen=True)
class MonitorMemory:
    """How far the peak of a training step rises under a monitor of 64 rows, in MB, on one layer of a long context."""

    length: int

    def measure(self) -> list[Row]:
        model = build_gpt(layers=1)
        monitor = Monitor(model, every=1, rows=64, alerts=None)
        watched, plain = training(model, self.length, monitor), training(build_gpt(layers=1), self.length)
        extra = (peak_bytes(watched) - peak_bytes(plain)) / 2**20
        monitor.close()
        return [Row("monitor", "every_1", "training step", "extra_mb", self.length, *(extra,) * 3, *label(4, 64))]


@dataclass(frozen=True)
class MatrixCost:
    """How many times more the same quantities cost through matrices of all weights than through the monitor."""

    length: int
    rounds: int

    def measure(self) -> list[Row]:
        watched, matrices, plain = build_gpt(), build_gpt(), build_gpt()
        monitor = Monitor(watched, every=1, rows=64, alerts=None)
        for block in matrices.blocks:
            block.attention = MatrixAttention(build_policy("log"))  # which is also the others'
        baseline = training(plain, self.length)
        with_matrices = interleaved_ratio(training(matrices, self.length), baseline, self.rounds)
        with_monitor = interleaved_ratio(training(watched, self.length, monitor), baseline, self.rounds)
        monitor.close()
        # Both are over the same plain step; their quartiles do not combine into one.
        times = (with_matrices.median - 1) / max(with_monitor.median - 1, 1e-3)
        labels = label(4, 64)
        return [
            Row("monitor", "output_attentions", "training step", "times_cheaper", self.length, *(times,) * 3, *labels)
        ]


class MatrixAttention(nn.Module):
    """Attention that returns to the n × n matrix for its statistics, as `output_attentions` makes one do.

    It looks at all rows, as there they all are, but only forward, and at no angles.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Causal attention [B, H, T, D]; the statistics are computed, and dropped."""
        weights = attention_weights(query, key, is_causal=is_causal, policy=self.policy)
        with torch.no_grad():
            seen = weights.detach()
            scores = query.detach() @ key.detach().mT * query.shape[-1] ** -0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            seen.amax(-1), torch.special.entr(seen).sum(-1)
            count_gaps(scores, THRESHOLDS, mask), bracket_accumulation(scores, MIN_RANK, mask)
        out: Tensor = weights @ value
        return out


def training(model: Gpt, length: int, monitor: Monitor | None = None) -> Callable[[], None]:
    """A function that makes one training step on the same tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(0))
    done = [0]

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if monitor is not None:
            monitor.step(done[0])
            done[0] += 1

    return step


def _times(step: Callable[[], None], count: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps
