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
    parser.show_examples("run/attn.jsonl", "demo --output demo.html")
    parser.add_argument("path", type=Path, help="JSONL file that a JsonlSink has written, or folder of an evaluation")
    parser.add_argument("--output", type=Path, help="page (default: beside the file, or report.html in the folder)")


def _doctor(_: Namespace) -> int:
    from attnscale.doctor import doctor

    print(doctor())
    return 0


def _policies(_: Namespace) -> int:
    """Two lines per policy: name and formula, and below it the parameters."""
    from attnscale.policies import POLICIES

    width = max(map(len, POLICIES))
    for name, kind in POLICIES.items():
        fields = [field for field in dataclasses.fields(kind) if field.init]
        parameters = ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields)
        print(f"{name:<{width}}  {(kind.__doc__ or '').strip().splitlines()[0]}")
        print(f"{'':<{width}}  {parameters or 'no parameters'}")
    return 0


def _watch(console: Console, options: Namespace) -> int:
    from attnscale.diagnostics.views.watch import show

    show(options.path, console, once=options.once)
    return 0


def _report(options: Namespace) -> int:
    from attnscale.report import write_report

    print(f"wrote {write_report(options.path, options.output)}")
    return 0
