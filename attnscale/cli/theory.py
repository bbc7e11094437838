"""The command `theory`: predictions of the papers, or of a user's score family, against measurements."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.cli.evaluate import read_list
from attnscale.cli.parser import Parser, shown_progress
from attnscale.errors import reject
from attnscale.theory import experiments
from attnscale.theory.experiments import NAMES, STANDARD_ERRORS, Comparison, Experiment

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from attnscale.theory.user_family import FamilyGaps

ALL = "all"
ABOUT = (
    "s.e.: standard error of the measured value, empty if nothing is random. relative: (measured − predicted)/"
    "|predicted|; the difference if 0 is predicted. kind: exact, holds at these parameters; limit, holds for n → ∞ or "
    "to leading order and may differ at finite n; bound, the largest value allowed. agree: yes or no, within "
    f"{STANDARD_ERRORS} standard errors (one-sided for a bound); equal, nothing is random and the values are equal to "
    "rounding; -, a limit without standard error."
)
FAMILY_OPTIONS = ("n", "t", "sigma")


def theory(parser: Parser) -> None:
    """Options of `attnscale theory`."""
    parser.set_defaults(run=_theory)
    parser.show_examples("all --quick", "gaps --family mine.py --n 64:16384 --t 0.5,1,2 --sigma 2")
    parser.add_argument("name", choices=(*NAMES, ALL), metavar="NAME", help=f"{', '.join(NAMES)} or {ALL}")
    parser.add_argument("--output", type=Path, default=Path("theory"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples: all within two minutes")
    group = parser.add_argument_group("your own scores", "gap counts and Λ of a score family; only with NAME gaps")
    about = (
        "Python file with draw(n, generator), which returns raw scores [n] or [rows, n]. Optional in the file: "
        "EXPONENT, the predicted p of Λ ~ (ln n)^p; accumulation(n), the predicted median Λ; ASYMPTOTIC = True if "
        "accumulation(n) holds for n → ∞ only. Instead of a file: a family of attnscale.theory.families, e.g. gaussian"
    )
    group.add_argument("--family", metavar="FILE", help=about)
    lengths = (
        "keys per row: at least three whole numbers from 2 to 4194304; A:B doubles from A to B (default: "
        "64,256,1024,4096,16384,65536; with --quick 64,256,1024,4096)"
    )
    group.add_argument("--n", metavar="N,N|N:N", help=lengths)
    gaps = (
        "gaps t > 0 at which N(t) is counted, the number of keys with a score within t of the best; compared with the "
        "scores after --sigma (default: 1/2, 1, 2 and 4 times the median contact gap at the shortest n, which is the "
        "gap t where ln N(t)/t is largest)"
    )
    group.add_argument("--t", metavar="T,T", help=gaps)
    group.add_argument("--sigma", metavar="X", help="factor X > 0 on the drawn scores; divides Λ by X (default: 1)")


def _theory(console: Console, options: argparse.Namespace) -> int:
    with options.parser.bad_arguments():
        if options.output.exists() and not options.output.is_dir():
            reject("output", str(options.output), "a folder, or a path that does not exist")
        if options.family is not None and options.name != "gaps":
            reject("family", options.family, f"no family with NAME {options.name}: only `theory gaps` takes one")
        for name in FAMILY_OPTIONS:
            value = getattr(options, name)
            if options.family is None and value is not None:
                reject(name, value, "an option together with --family")
    if options.family is not None:
        return _family(console, options)
    found: list[Experiment] = []
    count = 0
    for name in NAMES if options.name == ALL else (options.name,):
        began = time.perf_counter()
        with shown_progress(console) as progress:
            found.append(experiments.run(name, options.quick, progress))
        with console.status(f"drawing {name}"):
            count += len(experiments.write(found[-1], options.output))
        console.print(comparison_table(name, found[-1].comparisons, time.perf_counter() - began, console.width))
    panels = [panel for result in found for panel in result.strip]
    if options.name == ALL and panels:
        count += len(experiments.write_strip(panels, options.output))
    return _finish(console, count, options.output)


def _family(console: Console, options: argparse.Namespace) -> int:
    from attnscale.theory import user_family

    with options.parser.bad_arguments():
        lengths = None if options.n is None else read_list("n", options.n, numbers=True)
        gaps = None if options.t is None else tuple(_number("t", part) for part in options.t.split(","))
        settings = user_family.Settings(lengths, gaps, _number("sigma", options.sigma or "1"), options.quick)
    family = user_family.find_family(options.family)
    with shown_progress(console) as progress:
        found = user_family.measure(family, settings, progress)
    written = experiments.write(user_family.experiment(found), options.output)
    for table in family_tables(found):
        console.print(table)
    if found.comparisons:
        console.print(comparison_table(f"{found.name}: predictions", found.comparisons, None, console.width))
    console.print(found.summary, highlight=False, markup=False)
    return _finish(console, len(written), options.output, about=bool(found.comparisons))


def _number(argument: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        reject(argument, text, "a number > 0" + ", or several with commas between them" * (argument == "t"))


def _finish(console: Console, count: int, folder: Path, about: bool = True) -> int:
    if about:
        console.print(ABOUT, highlight=False, markup=False)
    console.print(f"wrote {count} files into {folder}", markup=False, highlight=False, soft_wrap=True)
    return 0


def comparison_table(name: str, comparisons: Sequence[Comparison], seconds: float | None, width: int) -> Table:
    """Predicted and measured values, one row per comparison; below 100 columns the parameters get their own line."""
    from rich.markup import escape

    headers = ("predicted", "measured", "s.e.", "relative", "kind", "agree")
    table = _table(name if seconds is None else f"{name} ({seconds:.0f} s)", *headers, text="quantity, parameters")
    for line in comparisons:
        error = "" if line.standard_error is None else f"{line.standard_error:.2g}"
        numbers = (f"{line.predicted:.5g}", f"{line.measured:.5g}", error, f"{line.relative_error:+.1e}")
        text = ("\n" if width < 100 else ", ").join(filter(None, (line.quantity, line.parameters)))
        table.add_row(escape(text), *numbers, line.kind, line.agreement)
    return table


def family_tables(found: FamilyGaps) -> list[Table]:
    """Λ at each n, and N(t) at each n with up to four t side by side."""
    scales = _table(
        f"{found.name}: accumulation scale Λ", "n", "rows", "median Λ ± s.e.", "contact gap", "contact rank"
    )
    for row in found.scales:
        numbers = (f"{row['contact_gap']:.5g}", f"{row['contact_rank']:.5g}")
        scales.add_row(str(row["n"]), str(row["rows"]), _estimate(row["median"], row["median_error"]), *numbers)
    tables, gaps = [scales], found.counts.distinct("t")
    for start in range(0, len(gaps), 4):
        shown = gaps[start : start + 4]
        tables.append(_table(f"{found.name}: mean gap count N(t) ± s.e.", "n", *(f"t = {t:g}" for t in shown)))
        for _, n, part in found.counts.series("n"):
            cells = (_estimate(row["measured"], row["standard_error"]) for row in part if row["t"] in shown)
            tables[-1].add_row(str(n), *cells)
    return tables


def _estimate(value: float, error: float) -> str:
    return f"{value:.5g} ± {error:.2g}"


def _table(title: str, *numbers: str, text: str | None = None) -> Table:
    """A table with an optional column of text, which wraps, before columns of numbers, which do not."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    if text is not None:
        table.add_column(text, overflow="fold")
    for header in numbers:
        table.add_column(header, justify="left" if header in ("kind", "agree") else "right", no_wrap=True)
    return table
