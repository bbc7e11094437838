"""What an attention problem amounts to: operations, least traffic, and the fastest that a card could do it."""

from __future__ import annotations

from typing import NamedTuple

from attnscale.bench.gpu.problem import Problem

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
