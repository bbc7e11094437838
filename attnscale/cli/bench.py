"""The command `bench`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser, moved

if TYPE_CHECKING:
    from rich.console import Console


def bench(parser: Parser) -> None:
    """Options of `attnscale bench`. The CPU benchmark and the static table are no longer part of the package."""
    parser.set_defaults(run=_bench)
    parser.show_examples("gpu --bundle gpu.zip", "gpu --dry-run")
    parser.add_argument("on", nargs="?", choices=("gpu", "cpu"), default="cpu", help="gpu: benchmark the current GPU")
    parser.add_argument("--output", type=Path, help="CSV file to write (default: gpu.csv)")
    parser.add_argument("--config", type=Path, help="YAML file with lengths and rounds (default: by GPU)")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for plots (default: no plots)")
    parser.add_argument("--bundle", type=Path, metavar="ZIP", help="ZIP file with all results, for sharing")
    without = parser.add_mutually_exclusive_group()
    without.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes in triton's interpreter")
    without.add_argument("--static", action="store_true", help="moved: python -m scripts.static --print")


def _bench(console: Console, options: Namespace) -> int:
    if options.static:
        moved("attnscale bench gpu --static", "python -m scripts.static --print")
    if options.on == "cpu":
        moved("attnscale bench cpu", "python -m scripts.cost")
    from attnscale.bench.gpu.command import run
    from attnscale.doctor import doctor

    return run(
        console,
        config=options.config,
        output=options.output,
        plots=options.plots,
        bundle=options.bundle,
        dry_run=options.dry_run,
        diagnose=doctor,
    )
