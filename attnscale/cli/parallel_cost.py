"""The command `plan`: estimated memory, communication and operations of each context-parallel method.

The estimate uses tensor sizes and published peak rates. Latency, overlap and padding are not modelled.
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

# Published peak rates of dense matrix products without TF32, in 10¹² operations per second.
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
    parser.add_argument("--heads", type=int, required=True, help="number of query heads")
    parser.add_argument("--key-heads", type=int, help="number of key-value heads (default: number of query heads)")
    parser.add_argument("--head-dim", type=int, default=128, help="dimension of a head (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="batch size (default: %(default)s)")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32 or fp64 (default: %(default)s)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(PEAKS)} (default: %(default)s)")
    parser.add_argument("--parallel", default="cp=8", help="number of context-parallel ranks (default: %(default)s)")


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
        f"Estimate, not a measurement: causal attention over {found.length:,} tokens, batch {found.batch}, "
        f"{found.heads} query heads, {found.key_heads or found.heads} key-value heads, head dimension "
        f"{found.head_dim}, {found.dtype}, on {found.processes} × {options.device.upper()}. Per rank and layer:"
    )
    columns = "method", "memory", "sent, forward", "sent, backward", "operations per byte sent", "forward at peak rate"
    table = Table(*columns)
    peak = PEAKS[options.device.lower()].get(found.dtype)
    for cost in found.costs():
        sizes = (_bytes(size) for size in (cost.memory, cost.sent_forward, cost.sent_backward))
        at_peak = "" if peak is None else f"{cost.operations / peak / 1e9:,.1f} ms"
        table.add_row(cost.method, *sizes, f"{cost.intensity:,.0f}", at_peak)
    console.print(table)
    if found.heads % found.processes:
        console.print(f"ulysses is not available: {found.heads} heads are not a multiple of {found.processes} ranks.")
    return 0


def _bytes(size: int) -> str:
    """Format a size in the largest unit with a value of at least 1."""
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), UNITS[-1])
    return f"{size / unit:,.1f} {name}"


class MethodCost(NamedTuple):
    """Cost of one method per rank and layer: bytes, and operations of the forward pass."""

    method: str
    memory: int  # forward pass: own tokens, received tokens, and fp32 accumulators
    sent_forward: int
    sent_backward: int
    operations: float

    @property
    def intensity(self) -> float:
        """Operations of the forward pass per byte sent; ∞ if nothing is sent."""
        return self.operations / self.sent_forward if self.sent_forward else math.inf


@dataclass(frozen=True)
class ShardedAttention:
    """Causal attention over `length` tokens, split evenly over `processes`.

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
    row_beta: bool = True  # β differs between rows and is sent together with them

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            reject("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        for name in ("heads", "head_dim", "batch"):
            if getattr(self, name) < 1:
                reject(name, getattr(self, name), "an int >= 1")
        if self.length < 1 or self.processes < 1 or self.length % self.processes:
            reject("length", self.length, f"a multiple of the number of processes, {self.processes}")
        if self.key_heads is not None and (self.key_heads < 1 or self.heads % self.key_heads):
            reject("key_heads", self.key_heads, f"a divisor of heads={self.heads}")

    def costs(self) -> list[MethodCost]:
        """Return the cost of each available method."""
        size, token = self.processes, self.batch * self.head_dim * DTYPES[self.dtype]  # bytes per head and token
        own, key_heads = self.length // size, self.key_heads or self.heads
        queries, keys = self.heads * own * token, 2 * key_heads * own * token  # of this rank; keys and values
        local = 2 * queries + keys  # queries, output, keys and values
        operations = 2.0 * self.batch * self.heads * self.head_dim * self.length * self.length / size
        found = [MethodCost("gather", local + size * keys, (size - 1) * keys, (size - 1) * keys, operations)]
        if self.heads % size == 0:
            repeated = keys * (size // math.gcd(key_heads, size))
            beta = self.batch * self.heads * own * FP32 if self.row_beta else 0
            forward, backward = (
                (2 * queries + repeated + rows) * (size - 1) // size
                for rows in (beta, 0)  # β has a gradient only if it is learned
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
    """Parse a number of tokens, with k for 2¹⁰ and M for 2²⁰.

    >>> read_length("1M"), read_length("128k"), read_length("4096")
    (1048576, 131072, 4096)
    """
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if factor > 1 else text
    if not digits.isdigit():
        reject("length", text, "an int such as 4096, 128k or 1M")
    return int(digits) * factor


def read_parallel(text: str) -> int:
    """Parse the number of processes in "cp=8".

    >>> read_parallel("cp=8")
    8
    """
    way, _, number = text.partition("=")
    if way != "cp" or not number.isdigit() or int(number) < 1:
        reject("parallel", text, "cp=PROCESSES, such as cp=8")
    return int(number)
