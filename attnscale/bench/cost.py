"""What a policy costs: time and memory of attention against torch's own, and the time of the import."""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale.attention import scaled_dot_product_attention
from attnscale.bench.memory import peak_bytes
from attnscale.bench.ratio import interleaved_ratio
from attnscale.bench.rows import Row
from attnscale.config import read_yaml
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies import build_policy
from attnscale.policies.base import check_length

# What the project promises; `summarise` shows it beside what was measured.
TARGETS = {"constant": 1.02, "other": 1.05, "copies": 1.0, "import": 150.0}


@dataclass(frozen=True)
class Plan:
    """What to measure: `rounds` has a number of interleaved rounds for each of `lengths`."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    policies: tuple[str, ...] = ("constant", "sqrt_log", "log", "log_squared", "llama4")
    heads: int = 8
    head_dim: int = 64
    rounds: tuple[int, ...] = (200, 25, 5)
    imports: int = 11

    def __post_init__(self) -> None:
        """Refuse what would fail only after minutes of measuring; quartiles need two measurements."""
        for name, least in (("heads", 1), ("head_dim", 1), ("imports", 2)):
            check_length(name, getattr(self, name), least=least)
        for name in ("lengths", "policies", "rounds"):
            if not isinstance(getattr(self, name), tuple):
                reject_type(name, getattr(self, name), "a list")
        for name, least in (("lengths", 1), ("rounds", 2)):
            for value in getattr(self, name):
                check_length(name, value, least=least)
        for policy in self.policies:
            if not isinstance(policy, str):
                reject_type("policies", policy, "names of policies")
            build_policy(policy)
        if len(self.rounds) != len(self.lengths):
            reject("rounds", self.rounds, f"as many as lengths={self.lengths}")

    @classmethod
    def read(cls, path: Path | None) -> Plan:
        """The plan in a YAML file, or the built-in one."""
        if path is None:
            return cls()
        content = read_yaml(path)
        known = [field.name for field in fields(cls)]
        unknown = [key for key in content if key not in known]
        if unknown:
            raise ArgumentError(f"key {unknown[0]!r} in {path} is not accepted: expected {', '.join(known)}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        return cls(**values)


class Case(Protocol):
    """Something to measure."""

    def measure(self) -> list[Row]: ...


def cases(plan: Plan) -> Iterator[Case]:
    """Everything a plan measures, in the order it is measured."""
    for length, rounds in zip(plan.lengths, plan.rounds, strict=True):
        for policy in plan.policies:
            for mode in ("forward", "forward+backward"):
                yield AttentionCost(plan, policy, length, mode, rounds)
    yield ImportCost(plan.imports)


@dataclass(frozen=True)
class AttentionCost:
    """One policy at one length, forward or with backward: causal, fp32, on the CPU."""

    plan: Plan
    policy: str
    length: int
    mode: str
    rounds: int

    def measure(self) -> list[Row]:
        ours = functools.partial(scaled_dot_product_attention, policy=build_policy(self.policy))
        candidate, baseline = self._step(ours), self._step(F.scaled_dot_product_attention)
        rows = [self._row("time_ratio", *interleaved_ratio(candidate, baseline, self.rounds))]
        if self.policy != "constant":
            # What torch itself takes for logits as sharp as these: small weights are slow numbers on some CPUs.
            sharp = self._step(F.scaled_dot_product_attention, sharpen=True)
            rows.append(self._row("time_ratio_same_logits", *interleaved_ratio(candidate, sharp, self.rounds)))
        copy = 4 * self.plan.heads * self.length * self.plan.head_dim
        extra = (peak_bytes(candidate) - peak_bytes(baseline)) / copy
        return [*rows, self._row("extra_query_copies", extra, extra, extra)]

    def _step(self, attention: Callable[..., Tensor], *, sharpen: bool = False) -> Callable[[], object]:
        shape = (1, self.plan.heads, self.length, self.plan.head_dim)
        generator = torch.Generator().manual_seed(self.length)
        backward = self.mode != "forward"
        q, k, v = (torch.randn(shape, generator=generator).requires_grad_(backward) for _ in range(3))
        gradient = torch.randn(shape, generator=generator)
        if sharpen:
            beta = build_policy(self.policy)(torch.arange(1, self.length + 1))
            q = (q.detach() * beta[:, None]).requires_grad_(backward)

        def step() -> None:
            with torch.set_grad_enabled(backward):
                out = attention(q, k, v, is_causal=True)
            if backward:
                torch.autograd.grad(out, (q, k, v), gradient)

        return step

    def _row(self, metric: str, y: float, low: float, high: float) -> Row:
        config = f"H={self.plan.heads} D={self.plan.head_dim} fp32 causal threads={torch.get_num_threads()}"
        return Row("attention", self.policy, self.mode, metric, self.length, y, low, high, config, *_machine())


@dataclass(frozen=True)
class ImportCost:
    """What `import attnscale` adds to `import torch`, in milliseconds, each time in a new process."""

    times: int

    def measure(self) -> list[Row]:
        code = "import time, torch; t = time.perf_counter(); import attnscale; print(time.perf_counter() - t)"
        run = functools.partial(
            subprocess.run, [sys.executable, "-c", code], capture_output=True, check=True, text=True
        )
        seconds = [float(run().stdout) for _ in range(self.times)]
        low, median, high = (1000 * second for second in statistics.quantiles(seconds, n=4))
        return [Row("import", "attnscale", "fresh process", "added_ms", 0, median, low, high, "", *_machine())]


def summarise(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Lines for a table: what was measured, the quartiles, and the target with a mark where it is missed."""
    for row in rows:
        if row.metric == "added_ms":
            target = TARGETS["import"]
        elif row.metric == "extra_query_copies":
            target = TARGETS["copies"]
        else:
            target = TARGETS.get(row.provider, TARGETS["other"])
        # Memory counts lengths and β as well: a few numbers a row, below a hundredth of the query.
        met = row.y <= target + (0.05 if row.metric == "extra_query_copies" else 0.0)
        digits = 0 if row.metric == "added_ms" else 3
        spread = "" if row.low == row.high else f"{row.low:.{digits}f} – {row.high:.{digits}f}"
        verdict = f"≤ {target:g}" + ("" if met else " missed")
        yield row.metric, str(row.x or ""), row.mode, row.provider, f"{row.y:.{digits}f}", spread, verdict


def _machine() -> tuple[str, str]:
    version: Any = torch.__version__
    return f"cpu {platform.machine()}", f"torch {version}"
