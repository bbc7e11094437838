"""The command `theory`: the papers' predictions against measurements, as a table, figures and data."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.parser import Parser
from attnscale.theory.experiments import NAMES, Comparison, Experiment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ALL = "all"
ABOUT = (
    "standard error: of the measured value; none where nothing is random. relative error: (measured − predicted) / "
    "|predicted|, or the difference where 0 is predicted."
)


def theory(parser: Parser) -> None:
    """Options of `attnscale theory`."""
    parser.set_defaults(run=_theory)
    parser.show_examples("gaps --quick", "all --output theory")
    parser.add_argument("name", choices=(*NAMES, ALL), metavar="NAME", help=f"{', '.join(NAMES)} or {ALL}")
    parser.add_argument("--output", type=Path, default=Path("theory"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples: all within two minutes")


def _theory(console: Console, options: argparse.Namespace) -> int:
    from attnscale.cli.parser import shown_progress
    from attnscale.theory import experiments

    found: list[Experiment] = []
    count = 0
    for name in NAMES if options.name == ALL else (options.name,):
        began = time.perf_counter()
        with shown_progress(console) as progress:
            found.append(experiments.run(name, options.quick, progress))
        with console.status(f"drawing {name}"):
            count += len(experiments.write(found[-1], options.output))
        console.print(comparison_table(name, found[-1].comparisons, time.perf_counter() - began))
    panels = [panel for result in found for panel in result.strip]
    if options.name == ALL and panels:
        strip = experiments.render(experiments.draw_strip(panels))
        count += len(experiments.write_picture(options.output / "strip", strip))
    console.print(ABOUT, highlight=False)
    console.print(f"wrote {count} files into {options.output}", markup=False, highlight=False, soft_wrap=True)
    return 0


def comparison_table(name: str, comparisons: Sequence[Comparison], seconds: float) -> Table:
    """Predicted, measured, standard error and relative error, a line per comparison."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    title = f"{name} ({seconds:.0f} s)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("quantity", overflow="fold")
    table.add_column("parameters", overflow="fold")
    for header in ("predicted", "measured", "standard error", "relative error"):
        table.add_column(header, justify="right", no_wrap=True)
    for line in comparisons:
        error = "" if line.standard_error is None else f"{line.standard_error:.2g}"
        numbers = (f"{line.predicted:.5g}", f"{line.measured:.5g}", error, f"{line.relative_error:+.1e}")
        table.add_row(escape(line.quantity), escape(line.parameters), *numbers)
    return table
