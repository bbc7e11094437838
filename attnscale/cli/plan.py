"""The command `plan`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console

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
    parser.add_argument("--device", default="h100", help="a100, h100, b200 or mi300x (default: %(default)s)")
    parser.add_argument("--parallel", default="cp=8", help="processes that share the sequence (default: %(default)s)")


def _plan(console: Console, options: Namespace) -> int:
    from rich.table import Table

    from attnscale.bench.context_plan import ContextPlan, card_of, read_length, read_parallel

    with options.parser.bad_arguments():
        target, card = card_of(options.device)
        found = ContextPlan(
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
        f"{found.processes} × {card.name}. Per process and layer:"
    )
    columns = "method", "memory", "sends, forward", "backward", "operations per byte sent", "forward at peak"
    table = Table(*columns)
    peak = card.peak_tflops(found.dtype) * 1e12
    for cost in found.costs():
        sizes = (_bytes(size) for size in (cost.memory, cost.sent_forward, cost.sent_backward))
        table.add_row(cost.method, *sizes, f"{cost.intensity:,.0f}", f"{1e3 * cost.operations / peak:,.1f} ms")
    console.print(table)
    if found.heads % found.processes:
        console.print(f"ulysses cannot be used: {found.heads} heads are not a multiple of {found.processes} processes.")
    added = found.statistics_overhead(target)
    if added is None:
        console.print(f"The static table has no fused forward in {found.dtype} with heads of {found.head_dim}.")
        return 0
    console.print(
        f"Statistics of all rows add {added.instructions:.0%} to the instructions of the fused forward, by its "
        f"compiled loop for {target}, and at most {max(added.fastest, added.slowest):.1%} to its time where latencies "
        "are hidden. The ring computes in the blockwise backend, which has no such loop."
    )
    return 0


def _bytes(size: int) -> str:
    """In the largest unit that gives at least 1."""
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), UNITS[-1])
    return f"{size / unit:,.1f} {name}"
