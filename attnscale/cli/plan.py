"""The command `plan`."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console


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
    columns = "method", "memory", "sent, forward", "sent, backward", "operations / byte", "forward at peak"
    table = Table(
        *columns, title=f"A model, not a measurement: per process and layer, {card.name}", title_justify="left"
    )
    peak = card.peak_tflops(found.dtype) * 1e12
    for cost in found.costs():
        sizes = (f"{size / 2**20:,.1f} MiB" for size in (cost.memory, cost.sent_forward, cost.sent_backward))
        table.add_row(cost.method, *sizes, f"{cost.intensity:,.0f}", f"{1e3 * cost.operations / peak:,.1f} ms")
    console.print(table)
    added = found.statistics_overhead(target)
    if added is not None:
        fastest, slowest = sorted((added.fastest, added.slowest))
        console.print(
            f"Statistics of all rows add {fastest:.1%} to {slowest:.1%} to the time of the fused forward, by its "
            f"compiled loop for {target}; the ring computes in the blockwise backend."
        )
    return 0
