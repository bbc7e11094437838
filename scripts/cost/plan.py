"""Plan of the CPU benchmark: cases, cost of policies and of the import, and targets."""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from attnscale._util.files import read_yaml
from attnscale.attention import scaled_dot_product_attention
from attnscale.bench.rows import Row
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies import LengthPolicy, build_policy
from attnscale.policies.fields import read_length
from scripts.cost.attention import (
    PROVIDERS,
    FlexAttentionCost,
    StatisticsMemory,
    TimeRatio,
    eager_matrix,
    provider,
    with_statistic,
)
from scripts.cost.measuring import causal_step, interleaved_ratio, label, peak_bytes
from scripts.cost.models import ModelCost
from scripts.cost.monitor import MatrixCost, MonitorCost, MonitorMemory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Above this β, underflowing weights affect the time.
SHARP = 16.0

# Metrics where higher is better, with their targets.
AT_LEAST = {"times_slower": 6.0, "times_cheaper": 10.0}

# Alternatives to this package, measured for comparison and without a target.
RIVALS = ("flex_attention",)


@dataclass(frozen=True)
class Plan:
    """The measurements: each `rounds` tuple gives the interleaved rounds for the lengths in the corresponding tuple."""

    lengths: tuple[int, ...] = (512, 2048, 8192)
    policies: tuple[str, ...] = ("constant", "sqrt_log", "log", "log_squared")
    half_policies: tuple[str, ...] = ("log",)
    heads: int = 8
    head_dim: int = 64
    rounds: tuple[int, ...] = (200, 25, 5)
    rival_lengths: tuple[int, ...] = (2048, 4096)
    statistics_lengths: tuple[int, ...] = (2048, 4096, 8192)
    statistics_rounds: tuple[int, ...] = (45, 25, 9)
    eager_lengths: tuple[int, ...] = (4096,)
    memory_lengths: tuple[int, ...] = (16384,)
    monitor_lengths: tuple[int, ...] = (1024,)
    model_lengths: tuple[int, ...] = (4096,)
    imports: int = 11

    def __post_init__(self) -> None:
        """Reject invalid values before minutes of measuring. Quartiles need at least two measurements."""
        for name, least in (("heads", 1), ("head_dim", 1), ("imports", 2)):
            read_length(name, getattr(self, name), least=least)
        more = (
            "rival_lengths",
            "eager_lengths",
            "memory_lengths",
            "monitor_lengths",
            "model_lengths",
        )
        tuples = ("lengths", "rounds", "statistics_lengths", "statistics_rounds", *more)
        for name in (*tuples, "policies", "half_policies"):
            if not isinstance(getattr(self, name), tuple):
                reject_type(name, getattr(self, name), "a list")
        for name in tuples:
            for value in getattr(self, name):
                read_length(name, value, least=2 if name.endswith("rounds") else 1)
        for name in ("policies", "half_policies"):
            for policy in getattr(self, name):
                if not isinstance(policy, str):
                    reject_type(name, policy, "a list of policy names")
                build_policy(policy)
        for rounds, lengths in (("rounds", "lengths"), ("statistics_rounds", "statistics_lengths")):
            if len(getattr(self, rounds)) != len(getattr(self, lengths)):
                reject(rounds, getattr(self, rounds), f"the length of {lengths}={getattr(self, lengths)}")

    @classmethod
    def read(cls, path: Path | None) -> Plan:
        """Read the plan from a YAML file; None gives the built-in plan."""
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
    """A measurement."""

    def measure(self) -> list[Row]: ...


def cases(plan: Plan) -> Iterator[Case]:
    """Yield all cases of a plan in measurement order."""
    for length, rounds in zip(plan.lengths, plan.rounds, strict=True):
        for dtype, policies in (("fp32", plan.policies), ("bf16", plan.half_policies)):
            for policy in policies:
                for mode in ("forward", "forward+backward"):
                    yield AttentionCost(plan, policy, length, mode, rounds, dtype)
    for length in plan.rival_lengths:
        yield FlexAttentionCost(plan.heads, plan.head_dim, length, rounds=11)
    for length, rounds in zip(plan.statistics_lengths, plan.statistics_rounds, strict=True):
        for name in PROVIDERS:
            yield _ratio(plan, "statistics", name, provider(name), length, "forward", rounds)
        name = "stats_all_rows"
        yield _ratio(plan, "statistics", name, provider(name), length, "forward+backward", rounds)
        for name in ("lse", "entropy"):
            carried, plain = (with_statistic(name, differentiable=flag) for flag in (True, False))
            shape = plan.heads, plan.head_dim, length, "forward+backward", rounds
            yield TimeRatio("statistics", f"gradient_of_{name}", "time_ratio", carried, plain, *shape)
    for length in plan.eager_lengths:
        shape = plan.heads, plan.head_dim, length, "forward", 3
        baseline = provider("stats_all_rows")
        yield TimeRatio("statistics", "eager_matrix", "times_slower", eager_matrix, baseline, *shape)
    for length in plan.memory_lengths:
        yield StatisticsMemory(plan.heads, plan.head_dim, length)
    for length in plan.monitor_lengths:
        for name, rounds in (("every_1", 45), ("every_10", 12), ("every_50", 5), ("tracked", 100)):
            yield MonitorCost(name, length, rounds)
        yield MatrixCost(length, rounds=3)
        yield MonitorMemory(8 * length)
    # Skipped if transformers is not installed.
    for length in plan.model_lengths if importlib.util.find_spec("transformers") else ():
        for padded in (False, True):
            yield ModelCost("prefill", length, rounds=3, padded=padded)
            yield ModelCost("decode", length, rounds=25, padded=padded)
    yield ImportCost(plan.imports)


def _ratio(
    plan: Plan, kernel: str, name: str, candidate: Callable[..., Tensor], length: int, mode: str, rounds: int
) -> TimeRatio:
    """Return the case of a function relative to torch's attention."""
    baseline = F.scaled_dot_product_attention
    return TimeRatio(kernel, name, "time_ratio", candidate, baseline, plan.heads, plan.head_dim, length, mode, rounds)


@dataclass(frozen=True)
class AttentionCost:
    """One policy at one length, causal, with or without backward pass, relative to torch in the same dtype."""

    plan: Plan
    policy: str
    length: int
    mode: str
    rounds: int
    dtype: str = "fp32"

    def measure(self) -> list[Row]:
        policy, dtype = build_policy(self.policy), DTYPES[self.dtype]
        step = functools.partial(
            causal_step,
            heads=self.plan.heads,
            length=self.length,
            head_dim=self.plan.head_dim,
            backward=self.mode != "forward",
            dtype=dtype,
        )
        candidate = step(functools.partial(scaled_dot_product_attention, policy=policy))
        baseline = step(F.scaled_dot_product_attention)
        rows = [self._row("time_ratio", *interleaved_ratio(candidate, baseline, self.rounds))]
        if isinstance(policy, LengthPolicy) and policy.longest_beta() > SHARP:
            # Baseline with equally sharp logits: denormal numbers are slow on some CPUs.
            sharp = step(F.scaled_dot_product_attention, beta=policy(torch.arange(1, self.length + 1, device="cpu")))
            rows.append(self._row("time_ratio_same_logits", *interleaved_ratio(candidate, sharp, self.rounds)))
        copy = dtype.itemsize * self.plan.heads * self.length * self.plan.head_dim
        extra = (peak_bytes(candidate) - peak_bytes(baseline)) / copy
        return [*rows, self._row("extra_query_copies", extra, extra, extra)]

    def _row(self, metric: str, y: float, low: float, high: float) -> Row:
        labels = label(self.plan.heads, self.plan.head_dim, self.dtype)
        provider = self.policy if self.dtype == "fp32" else f"{self.policy}_{self.dtype}"
        return Row("attention", provider, self.mode, metric, self.length, y, low, high, *labels)


@dataclass(frozen=True)
class ImportCost:
    """Milliseconds that `import attnscale` adds to `import torch`, in fresh processes.

    Bytecode is cached, as for an installed package.
    """

    times: int

    def measure(self) -> list[Row]:
        clock = "time.perf_counter()"
        code = f"import sys, time, torch; t = {clock}; import attnscale; sys.stdout.write(str({clock} - t))"
        with tempfile.TemporaryDirectory() as folder:
            kept = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
            run = functools.partial(
                subprocess.run, [sys.executable, "-c", code], env=kept, capture_output=True, check=True, text=True
            )
            run()
            seconds = [float(run().stdout) for _ in range(self.times)]
        low, median, high = (1000 * second for second in statistics.quantiles(seconds, n=4))
        _, device, version = label(0, 0)
        return [Row("import", "attnscale", "fresh process", "added_ms", 0, median, low, high, "", device, version)]


def summarise(rows: list[Row]) -> Iterator[tuple[str, ...]]:
    """Yield table lines: case, quartiles, and the target, marked if missed."""
    for row in rows:
        digits = 0 if row.metric in ("added_ms", "extra_mb") else 3
        spread = "" if row.low == row.high else f"{row.low:.{digits}f} – {row.high:.{digits}f}"
        yield row.metric, str(row.x or ""), row.mode, row.provider, f"{row.y:.{digits}f}", spread, verdict(row)


def verdict(row: Row) -> str:
    """Return the target of a row, marked if missed; empty for alternatives."""
    if row.provider in RIVALS:
        return ""
    target = target_of(row)
    if row.metric in AT_LEAST:
        met, sign = row.y >= target, "≥"
    else:
        # Memory includes n and β, a few numbers per row: less than 1 % of the query.
        met, sign = row.y <= target + 0.05 * (row.metric == "extra_query_copies"), "≤"
    return f"{sign} {target:g}" + ("" if met else " missed")


def target_of(row: Row) -> float:
    """Return the largest acceptable value of a row, or the smallest for metrics in `AT_LEAST`."""
    if row.provider.endswith("_bf16"):  # computed in fp32: q, k, v and output are copied at twice the width
        return {"extra_query_copies": 14.0}.get(row.metric, 1.2 if row.mode == "forward" else 1.5)
    by_metric = {"added_ms": 150.0, "extra_query_copies": 1.0, "extra_mb": 256.0, **AT_LEAST}
    if row.kernel == "monitor" and row.metric == "extra_mb":
        return 32.0
    if row.metric in by_metric:
        return by_metric[row.metric]
    if row.kernel == "monitor":
        return {"every_1": 1.25, "every_10": 1.03, "every_50": 1.01, "tracked": 1.02}[row.provider]
    if row.kernel == "transformers":
        return 1.03
    if row.provider == "stats_all_rows":
        return 2.1 if row.mode == "forward" else 1.7
    gradients = {"gradient_of_lse": 1.02, "gradient_of_entropy": 1.15}
    return {"constant": 1.02, "gap_adaptive": 3.5, **gradients}.get(row.provider, 1.05)
