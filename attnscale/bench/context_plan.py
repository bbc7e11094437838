"""A model of context parallel attention: memory, bytes sent and operations of each method, per process and layer.

Sizes of tensors and published peak rates, not a measurement: no latencies, no overlap, no padding of a backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from attnscale.bench.static.cards import CARDS, Card
from attnscale.bench.static.roofline import Overhead, overhead
from attnscale.bench.static.table import static_table
from attnscale.errors import reject

FP32 = 4
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
TARGETS = {card.name.lower(): target for target, card in CARDS.items()}


class Cost(NamedTuple):
    """Of one method, for one process and one layer; bytes, and operations of a forward."""

    method: str
    memory: int  # of a forward: own tokens, what comes from other processes, and sums in fp32
    sent_forward: int
    sent_backward: int
    operations: float

    @property
    def intensity(self) -> float:
        """Operations of a forward for each byte it sends; ∞ where it sends none."""
        return self.operations / self.sent_forward if self.sent_forward else math.inf


@dataclass(frozen=True)
class ContextPlan:
    """One causal attention of `length` tokens over `processes`, each with as many tokens.

    >>> [cost.method for cost in ContextPlan(length=2**20, heads=32, key_heads=8, processes=8).costs()]
    ['gather', 'ulysses', 'ring']
    """

    length: int
    heads: int
    processes: int
    key_heads: int | None = None
    head_dim: int = 128
    batch: int = 1
    dtype: str = "bf16"
    row_beta: bool = True  # β differs from row to row, and is sent where rows are

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            reject("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        for name in ("heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                reject(name, getattr(self, name), "a number ≥ 1")
        if self.length < 1 or self.processes < 1 or self.length % self.processes:
            reject("length", self.length, f"a multiple of the {self.processes} processes")
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            reject("key_heads", self.key_heads, f"a divisor of the {self.heads} heads")

    def costs(self) -> list[Cost]:
        """Of each method that can be used."""
        size, token = self.processes, self.batch * self.head_dim * DTYPES[self.dtype]  # bytes of a head's token
        own, key_heads = self.length // size, self.key_heads or self.heads
        queries, keys = self.heads * own * token, 2 * key_heads * own * token  # of this process; keys with values
        local = 2 * queries + keys  # the output too
        operations = 2.0 * self.batch * self.heads * self.head_dim * self.length * self.length / size
        found = [Cost("gather", local + size * keys, (size - 1) * keys, (size - 1) * keys, operations)]
        if self.heads % size == 0:
            repeated = keys * (size // math.gcd(key_heads, size))
            beta = self.batch * self.heads * own * FP32 if self.row_beta else 0
            forward, backward = (
                (2 * queries + repeated + rows) * (size - 1) // size
                for rows in (beta, 0)  # β has a gradient only where it is learned
            )
            found.append(Cost("ulysses", local + 2 * queries + repeated, forward, backward, operations))
        sums = self.batch * own * FP32 * self.heads * self.head_dim
        gradients = 2 * key_heads * own * self.batch * self.head_dim * max(FP32, DTYPES[self.dtype])
        turns = size * gradients if size > 1 else 0
        found.append(Cost("ring", local + 2 * keys + sums, (size - 1) * keys, (size - 1) * keys + turns, operations))
        return found

    def statistics_overhead(self, target: str) -> Overhead | None:
        """What entropy and the rest add to the fused forward, by its compiled loop; None where the table has no row."""
        rows = static_table()
        for row in rows:
            if (row.family, row.dtype, row.dim, row.target) == ("forward", self.dtype, self.head_dim, target):
                found = overhead(row, rows) if row.name == "causal, entropy" else None
                if found is not None:
                    return found
        return None


def card_of(device: str) -> tuple[str, Card]:
    """The target of the static table, and the card, for a device's name."""
    if device.lower() not in TARGETS:
        reject("device", device, f"one of {', '.join(TARGETS)}")
    target = TARGETS[device.lower()]
    return target, CARDS[target]


def read_length(text: str) -> int:
    """A number of tokens, with k for 2¹⁰ and M for 2²⁰.

    >>> read_length("1M"), read_length("128k"), read_length("4096")
    (1048576, 131072, 4096)
    """
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit():
        reject("length", text, "a number of tokens such as 4096, 128k or 1M")
    return int(digits) * factor


def read_parallel(text: str) -> int:
    """The number of processes in "cp=8".

    >>> read_parallel("cp=8")
    8
    """
    way, _, number = text.partition("=")
    if way != "cp" or not number.isdigit() or int(number) < 1:
        reject("parallel", text, "cp=PROCESSES, such as cp=8")
    return int(number)
