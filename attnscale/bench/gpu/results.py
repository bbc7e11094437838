"""From seconds to rows: time, speed, traffic, share of the roofline, memory, error, and times over a baseline's."""

from __future__ import annotations

from typing import NamedTuple

from attnscale.bench.gpu.clock import spread
from attnscale.bench.gpu.figures import Card, work_of
from attnscale.bench.gpu.problem import Problem
from attnscale.bench.ratio import Spread
from attnscale.bench.rows import Row


class Result(NamedTuple):
    """What was measured of a provider: seconds of every round, bytes at the peak, share of the allowed error."""

    provider: str
    seconds: list[float]
    peak: int | None
    error_share: float
    row_numbers: int = 0


def rows_of(
    suite: str,
    mode: str,
    problem: Problem,
    results: list[Result],
    baselines: tuple[str, ...],
    card: Card | None,
    labels: tuple[str, str, str],
) -> list[Row]:
    """One row per number, times also over those of the fastest baseline, which the metric names.

    The share of the roofline only where the card is known and computes in half precision.
    """
    rivals = [result for result in results if result.provider in baselines]
    baseline = min(rivals, key=lambda result: spread(result.seconds).median, default=None)
    rows = []
    for result in results:
        numbers = metrics(mode, problem, result, card)
        if baseline is not None:
            # Of the same round: what slows the machine down slows both.
            ratios = [ours / theirs for ours, theirs in zip(result.seconds, baseline.seconds, strict=True)]
            numbers[f"time_over_{baseline.provider}"] = spread(ratios)
        rows += [
            Row(suite, result.provider, mode, metric, problem.keys, *number, *labels)
            for metric, number in numbers.items()
        ]
    return rows


def metrics(mode: str, problem: Problem, result: Result, card: Card | None) -> dict[str, Spread]:
    """Medians and quartiles by the name of the metric."""
    work = work_of(problem, mode, result.row_numbers)
    time = spread(result.seconds)
    found = {
        "us": _scaled(time, 1e6),
        "tflops": _rate(work.flops / 1e12, time),
        "gb": _constant(work.bytes / 1e9),
        "gb_per_s": _rate(work.bytes / 1e9, time),
        "error_share": _constant(result.error_share),
    }
    if result.peak is not None:
        found["peak_mb"] = _constant(result.peak / 2**20)
    if card is not None and problem.dtype.itemsize == 2:
        found["roofline_share"] = _scaled(found["tflops"], 1 / card.attainable(work))
    return found


def _scaled(value: Spread, factor: float) -> Spread:
    return Spread(*(number * factor for number in value))


def _rate(amount: float, time: Spread) -> Spread:
    """Of a speed: its quartiles are in the reverse order of those of the time."""
    return Spread(amount / time.median, amount / time.high, amount / time.low)


def _constant(value: float) -> Spread:
    return Spread(value, value, value)
