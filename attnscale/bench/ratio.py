"""How much longer one function takes than another, on a machine that is shared and noisy."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """The median of a measured ratio and the quartiles around it."""

    median: float
    low: float
    high: float


def interleaved_ratio(
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    rounds: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    pairs: int = 1,
) -> Spread:
    """Time of `candidate` over time of `baseline`: both run in each round, in random order, after a warm-up.

    What disturbs the machine for longer than a round disturbs both; the median drops what disturbs one. Each time the
    candidate runs `around` something that is not part of its time. In a round both run `pairs` times, in turn, and
    their sums are compared.
    """
    shuffle = random.Random(0)

    def seconds_of_candidate() -> float:
        with around():
            return _seconds(candidate)

    for _ in range(2):
        baseline()
        seconds_of_candidate()
    ratios = []
    for _ in range(rounds):
        candidates, baselines = [], []
        for _ in range(pairs):
            if shuffle.random() < 0.5:
                candidates.append(seconds_of_candidate())
                baselines.append(_seconds(baseline))
            else:
                baselines.append(_seconds(baseline))
                candidates.append(seconds_of_candidate())
        ratios.append(sum(candidates) / sum(baselines))
    low, median, high = statistics.quantiles(ratios, n=4)
    return Spread(median, low, high)


def in_both_roles(ratio: Callable[[Any, Any], Spread], one: Any, other: Any) -> Spread:
    """The mean of a ratio of two models and of the same with roles exchanged.

    Where a model lies in memory is worth several per cent, round after round: as much for one role as for the other.
    """
    first, second = ratio(one, other), ratio(other, one)
    return Spread(*(math.sqrt(a * b) for a, b in zip(first, second, strict=True)))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
