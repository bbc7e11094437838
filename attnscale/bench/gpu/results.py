"""From seconds to rows: time, speed, least traffic, share of the roofline, memory, error, time over a baseline's."""

from __future__ import annotations

from typing import NamedTuple

from attnscale.bench.gpu.problem import Problem
from attnscale.bench.rows import Row, Spread, spread

# The backward pass makes five products of the size of the forward's two.
BACKWARD = 2.5


class Work(NamedTuple):
    """Floating-point operations, and bytes that have to cross the memory bus at least once."""

    flops: float
    bytes: int


class Card(NamedTuple):
    """Peaks of a device: dense half-precision TFLOP/s and GB/s."""

    tflops: float
    bandwidth: float

    def attainable(self, work: Work) -> float:
        """The roofline: TFLOP/s that either the arithmetic or the memory allows.

        >>> Card(tflops=1000, bandwidth=2000).attainable(Work(flops=1e9, bytes=10**7))
        200.0
        """
        return min(self.tflops, self.bandwidth * work.flops / work.bytes / 1000)


def work_of(problem: Problem, mode: str, row_numbers: int = 0) -> Work:
    """Operations and traffic in a mode, "forward", "backward" or "forward+backward".

    Each input is read once and each result written once: q, k, v and the output forward; backward those and the
    gradient of the output are read, and dq, dk, dv written. `row_numbers` fp32 statistics are written for each row;
    what backward reads of the rows is one number each.
    """
    forward = Work(_flops(problem), 2 * _row_bytes(problem) + 2 * _slot_bytes(problem) + _numbers(problem, row_numbers))
    if mode == "forward":
        return forward
    rows, slots = 4 * _row_bytes(problem), 4 * _slot_bytes(problem)  # q, out, dout, dq · k, v, dk, dv
    backward = Work(BACKWARD * _flops(problem), rows + slots + _numbers(problem, 1))
    if mode == "backward":
        return backward
    return Work(forward.flops + backward.flops, forward.bytes + backward.bytes)


def _flops(problem: Problem) -> float:
    """Two products of 2·Tq·Tk·D a head, half of it hidden where attention is causal."""
    full = 4.0 * problem.batch * problem.heads * problem.queries * problem.keys * problem.dim
    return full / 2 if problem.causal else full


def _row_bytes(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.queries * problem.dim * problem.dtype.itemsize


def _slot_bytes(problem: Problem) -> int:
    return problem.batch * problem.kv_heads * problem.keys * problem.dim * problem.dtype.itemsize


def _numbers(problem: Problem, count: int) -> int:
    return 4 * count * problem.batch * problem.heads * problem.queries


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
