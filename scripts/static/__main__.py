"""Compile the kernels and report regressions against the table, or write the table: `python -m scripts.static`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.static.compiling import build_table, jobs
from scripts.static.per_score import misses
from scripts.static.printed import print_table
from scripts.static.table import FILE, differences, read_table, static_table, write_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a kernel is worse than in the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.static", description=__doc__)
    parser.add_argument("--write", type=Path, nargs="?", const=FILE, help=f"write the table (default: {FILE.name})")
    parser.add_argument("--quick", action="store_true", help="compile each variant for one target in turn")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help=f"print {FILE.name} and exit")
    parser.add_argument("--misses", action="store_true", help=f"print the goals that {FILE.name} misses and exit")
    options = parser.parse_args(arguments)
    if options.print:
        print_table(static_table())
        return 0
    if options.misses:
        print(json.dumps(misses(static_table()), indent=1, ensure_ascii=False))
        return 0
    if options.write == FILE and options.quick:
        parser.error(f"--quick compiles only some rows and cannot write {FILE.name}")
    found = build_table(jobs(all_targets=not options.quick), options.workers)
    if options.write is not None:
        write_table(found, options.write)
        return 0
    known = {row.key: row for row in read_table().rows}
    worse = [f"{row.key}: {what}" for row in found.rows for what in differences(known.get(row.key, row), row)]
    print("\n".join([*worse, f"{len(found.rows)} kernels, {len(worse)} differences"]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
