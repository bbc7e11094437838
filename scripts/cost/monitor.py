"""Cost of a monitor: training steps of a small GPT with a monitor, without, and with n × n weight matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale.attention import attention_weights
from attnscale.bench.rows import Row
from attnscale.diagnostics.monitor import Monitor
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy, PolicySpec, build_policy
from attnscale.statistics.gaps import bracket_accumulation, count_gaps
from attnscale.statistics.rows.quantities import MIN_RANK, THRESHOLDS
from scripts.cost.measuring import interleaved_ratio, label, peak_bytes


class Cadence(NamedTuple):
    """`every` and `track` of a monitor, and the number of summed steps, one of which is measured."""

    every: int
    steps: int
    track: bool = False


CADENCES = {
    "every_1": Cadence(1, 1),
    "every_10": Cadence(10, 10),
    "every_50": Cadence(50, 50),
    "tracked": Cadence(10**9, 1, track=True),  # none is measured: the cost of tracking, on top of the others
}


@dataclass(frozen=True)
class MonitorCost:
    """A training step (forward, backward, optimizer) with a monitor of 64 rows relative to one without."""

    name: str
    length: int
    rounds: int

    def measure(self) -> list[Row]:
        model = build_gpt()
        cadence = CADENCES[self.name]
        monitored = TemporaryMonitor(model, cadence)
        step = training(model, self.length, monitored.step)
        # The same model is used for both: the placement of a model in memory changes its time by several per cent.
        ratio = interleaved_ratio(step, step, self.rounds, monitored.attached, pairs=cadence.steps)
        return [Row("monitor", self.name, "training step", "time_ratio", self.length, *ratio, *label(4, 64))]


class TemporaryMonitor:
    """A monitor that is attached only while the candidate is timed; otherwise `step` does nothing."""

    def __init__(self, model: Gpt, cadence: Cadence) -> None:
        self._model = model
        self._cadence = cadence
        self._monitor: Monitor | None = None
        self._done = 0  # monitored steps so far

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach a monitor that continues the step count, so that every `every`-th step is measured."""
        every, track = self._cadence.every, self._cadence.track
        with Monitor(self._model, every=every, rows=64, alerts=None, track=track) as self._monitor:
            self._monitor.step(self._done)
            yield
        self._monitor = None

    def step(self, _: int) -> None:
        """Called at the end of each training step."""
        if self._monitor is not None:
            self._done += 1
            self._monitor.step(self._done)


@dataclass(frozen=True)
class MonitorMemory:
    """Additional peak memory in MB of a training step with a monitor of 64 rows, on one layer and a long context."""

    length: int

    def measure(self) -> list[Row]:
        model = build_gpt(layers=1)
        monitor = Monitor(model, every=1, rows=64, alerts=None)
        watched, plain = training(model, self.length, monitor.step), training(build_gpt(layers=1), self.length)
        extra = (peak_bytes(watched) - peak_bytes(plain)) / 2**20
        monitor.close()
        return [Row("monitor", "every_1", "training step", "extra_mb", self.length, *(extra,) * 3, *label(4, 64))]


@dataclass(frozen=True)
class MatrixCost:
    """Cost of the same quantities computed from full weight matrices, as a multiple of the monitor's cost."""

    length: int
    rounds: int

    def measure(self) -> list[Row]:
        watched, matrices, plain = build_gpt(), build_gpt(), build_gpt()
        monitor = Monitor(watched, every=1, rows=64, alerts=None)
        for block in matrices.blocks:
            block.attention = MatrixAttention(build_policy("log"))  # same policy as the other models
        baseline = training(plain, self.length)
        with_matrices = interleaved_ratio(training(matrices, self.length), baseline, self.rounds)
        with_monitor = interleaved_ratio(training(watched, self.length, monitor.step), baseline, self.rounds)
        monitor.close()
        # Both ratios refer to the same plain step; their quartiles cannot be combined.
        times = (with_matrices.median - 1) / max(with_monitor.median - 1, 1e-3)
        labels = label(4, 64)
        return [
            Row("monitor", "output_attentions", "training step", "times_cheaper", self.length, *(times,) * 3, *labels)
        ]


class MatrixAttention(nn.Module):
    """Attention that computes its statistics from the n × n matrix, as with `output_attentions`.

    Covers all rows, but only the forward pass and no angles.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """Causal attention [B, H, T, D]; the statistics are computed and discarded."""
        weights = attention_weights(query, key, is_causal=is_causal, policy=self.policy)
        with torch.no_grad():
            seen = weights.detach()
            scores = query.detach() @ key.detach().mT * query.shape[-1] ** -0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").tril()
            seen.amax(-1), torch.special.entr(seen).sum(-1)
            count_gaps(scores, THRESHOLDS, mask), bracket_accumulation(scores, MIN_RANK, mask)
        out: Tensor = weights @ value
        return out


def training(model: Gpt, length: int, after: Callable[[int], object] | None = None) -> Callable[[], None]:
    """Return a function that makes one training step on fixed tokens and then calls `after` with the step number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(256, (1, length + 1), generator=torch.Generator().manual_seed(0), device="cpu")
    done = [0]

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if after is not None:
            after(done[0])
        done[0] += 1

    return step


class Block(nn.Module):
    """Pre-norm attention and MLP with residual connections."""

    def __init__(self, width: int, heads: int, policy: PolicySpec) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention: nn.Module = ScaledDotProductAttention(policy)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, C]."""
        q, k, v = rearrange(self.inner(self.norms[0](x)), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        x = x + self.outer(rearrange(self.attention(q, k, v, is_causal=True), "b h t d -> b t (h d)"))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Gpt(nn.Module):
    """A small GPT."""

    def __init__(
        self, policy: PolicySpec = "log", layers: int = 6, width: int = 256, heads: int = 4, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, policy) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        logits: Tensor = self.head(x)
        return logits

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block; overridden for activation checkpointing."""
        out: Tensor = block(x)
        return out

    def loss(self, tokens: Tensor) -> Tensor:
        """Next-token cross-entropy."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_gpt(seed: int = 0, **arguments: object) -> Gpt:
    """Build a `Gpt`; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gpt(**arguments)  # type: ignore[arg-type]
