"""Compile the kernels and say where they got worse than the table, or write it: `python -m scripts.static`."""

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
    """The exit code is 1 where a kernel got worse than the table says."""
    parser = argparse.ArgumentParser(prog="python -m scripts.static", description=__doc__)
    parser.add_argument("--write", type=Path, nargs="?", const=FILE, help=f"write the table (default: {FILE.name})")
    parser.add_argument("--quick", action="store_true", help="each variant for one of the targets in turn")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--print", action="store_true", help=f"only print {FILE.name}")
    parser.add_argument("--misses", action="store_true", help=f"only print which goals {FILE.name} misses")
    options = parser.parse_args(arguments)
    if options.print:
        print_table(static_table())
        return 0
    if options.misses:
        print(json.dumps(misses(static_table()), indent=1, ensure_ascii=False))
        return 0
    if options.write == FILE and options.quick:
        parser.error(f"--quick leaves rows out: it does not write {FILE.name}")
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
