"""Commands that show what is there: `doctor`, `policies`, `watch`, `report`."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser

if TYPE_CHECKING:
    from rich.console import Console


def doctor(parser: Parser) -> None:
    """Options of `attnscale doctor`."""
    parser.set_defaults(run=_doctor)
    parser.show_examples("")


def policies(parser: Parser) -> None:
    """Options of `attnscale policies`."""
    parser.set_defaults(run=_policies)
    parser.show_examples("")


def watch(parser: Parser) -> None:
    """Options of `attnscale watch`."""
    parser.set_defaults(run=_watch)
    parser.show_examples("run/attn.jsonl", "run/attn.jsonl --once")
    parser.add_argument("path", type=Path, help="JSONL file that a JsonlSink writes")
    parser.add_argument("--once", action="store_true", help="print the present state and end")


def report(parser: Parser) -> None:
    """Options of `attnscale report`."""
    parser.set_defaults(run=_report)
    parser.show_examples("run/attn.jsonl --output run/report.html", "demo")
    parser.add_argument("path", type=Path, help="JSONL file that a JsonlSink has written, or folder of an evaluation")
    parser.add_argument("--output", type=Path, help="page (default: report.html, in the folder of an evaluation)")


def _doctor(console: Console, _: Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from attnscale.doctor import doctor

    table = Table("", "", "", title="attnscale doctor", show_header=False, title_justify="left")
    previous = ""
    for topic, subject, value in doctor().findings:
        if previous and topic != previous:
            table.add_section()
        table.add_row("" if topic == previous else f"[bold]{topic}[/]", subject, escape(value))
        previous = topic
    console.print(table)
    return 0


def _policies(console: Console, _: Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    from attnscale.policies import POLICIES

    table = Table("policy", "parameters", "β", title="Temperature policies", title_justify="left")
    for name, kind in POLICIES.items():
        fields = [field for field in dataclasses.fields(kind) if field.init]
        parameters = ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields)
        table.add_row(name, parameters, escape((kind.__doc__ or "").strip().splitlines()[0]))
    console.print(table)
    return 0


def _watch(console: Console, options: Namespace) -> int:
    from attnscale.diagnostics.views.watch import show

    show(options.path, console, once=options.once)
    return 0


def _report(console: Console, options: Namespace) -> int:
    from attnscale.report import write_report

    with console.status("reading records"):
        # Where the page goes by default depends on what is read.
        written = write_report(options.path, *([] if options.output is None else [options.output]))
    console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)
    return 0
