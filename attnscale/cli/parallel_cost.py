"""The command `plan`: memory, bytes sent and operations of each method of context parallel attention, by a model.

Sizes of tensors and published peak rates, not a measurement: no latencies, no overlap, no padding of a backend.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from attnscale.cli.parser import Parser
from attnscale.errors import reject

if TYPE_CHECKING:
    from rich.console import Console


FP32 = 4
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

# Dense matrix products without TF32, as published, in 10¹² operations a second.
PEAKS = {
    "a100": {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
    "l40s": {"bf16": 362.0, "fp16": 362.0, "fp32": 91.6},
    "h100": {"bf16": 989.0, "fp16": 989.0, "fp32": 67.0},
    "b200": {"bf16": 2250.0, "fp16": 2250.0, "fp32": 70.0},
    "rtx 5090": {"bf16": 209.5, "fp16": 209.5, "fp32": 104.8},
    "mi300x": {"bf16": 1307.0, "fp16": 1307.0, "fp32": 163.4},
}

UNITS = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")


def plan(parser: Parser) -> None:
    """Options of `attnscale plan`."""
    parser.set_defaults(run=_plan)
    parser.show_examples("--length 1M --heads 32 --key-heads 8 --device h100 --parallel cp=8")
    parser.add_argument("--length", required=True, help="tokens of the whole sequence, such as 128k or 1M")
    parser.add_argument("--heads", type=int, required=True, help="heads of queries")
    parser.add_argument("--key-heads", type=int, help="heads of keys (default: as many)")
    parser.add_argument("--head-dim", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32 (default: %(default)s)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(PEAKS)} (default: %(default)s)")
    parser.add_argument("--parallel", default="cp=8", help="processes that share the sequence (default: %(default)s)")


def _plan(console: Console, options: Namespace) -> int:
    from rich.table import Table

    with options.parser.bad_arguments():
        if options.device.lower() not in PEAKS:
            reject("device", options.device, f"one of {', '.join(PEAKS)}")
        found = ShardedAttention(
            length=read_length(options.length),
            heads=options.heads,
            key_heads=options.key_heads,
            head_dim=options.head_dim,
            batch=options.batch,
            dtype=options.dtype,
            processes=read_parallel(options.parallel),
        )
    console.print(
        f"A model, not a measurement: one causal attention of {found.length:,} tokens, batch {found.batch}, "
        f"{found.heads} heads ({found.key_heads or found.heads} of keys) of {found.head_dim} in {found.dtype}, over "
        f"{found.processes} × {options.device.upper()}. Per process and layer:"
    )
    columns = "method", "memory", "sends, forward", "backward", "operations per byte sent", "forward at peak"
    table = Table(*columns)
    peak = PEAKS[options.device.lower()].get(found.dtype)
    for cost in found.costs():
        sizes = (_bytes(size) for size in (cost.memory, cost.sent_forward, cost.sent_backward))
        at_peak = "" if peak is None else f"{cost.operations / peak / 1e9:,.1f} ms"
        table.add_row(cost.method, *sizes, f"{cost.intensity:,.0f}", at_peak)
    console.print(table)
    if found.heads % found.processes:
        console.print(f"ulysses cannot be used: {found.heads} heads are not a multiple of {found.processes} processes.")
    return 0


def _bytes(size: int) -> str:
    """In the largest unit that gives at least 1."""
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), UNITS[-1])
    return f"{size / unit:,.1f} {name}"


class MethodCost(NamedTuple):
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
class ShardedAttention:
    """One causal attention of `length` tokens over `processes`, each with as many tokens.

    >>> [cost.method for cost in ShardedAttention(length=2**20, heads=32, key_heads=8, processes=8).costs()]
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

    def costs(self) -> list[MethodCost]:
        """Of each method that can be used."""
        size, token = self.processes, self.batch * self.head_dim * DTYPES[self.dtype]  # bytes of a head's token
        own, key_heads = self.length // size, self.key_heads or self.heads
        queries, keys = self.heads * own * token, 2 * key_heads * own * token  # of this process; keys with values
        local = 2 * queries + keys  # the output too
        operations = 2.0 * self.batch * self.heads * self.head_dim * self.length * self.length / size
        found = [MethodCost("gather", local + size * keys, (size - 1) * keys, (size - 1) * keys, operations)]
        if self.heads % size == 0:
            repeated = keys * (size // math.gcd(key_heads, size))
            beta = self.batch * self.heads * own * FP32 if self.row_beta else 0
            forward, backward = (
                (2 * queries + repeated + rows) * (size - 1) // size
                for rows in (beta, 0)  # β has a gradient only where it is learned
            )
            found.append(MethodCost("ulysses", local + 2 * queries + repeated, forward, backward, operations))
        sums = self.batch * own * FP32 * self.heads * self.head_dim
        gradients = 2 * key_heads * own * self.batch * self.head_dim * max(FP32, DTYPES[self.dtype])
        turns = size * gradients if size > 1 else 0
        found.append(
            MethodCost("ring", local + 2 * keys + sums, (size - 1) * keys, (size - 1) * keys + turns, operations)
        )
        return found


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
