"""Compile the kernels and say where they got worse than the table, or write it: `python -m attnscale.bench.static`."""

from __future__ import annotations

import argparse
import json
import sys

from attnscale.bench.static.building import build_table, jobs
from attnscale.bench.static.goals import misses
from attnscale.bench.static.table import FILE, differences, read_table, static_table, write_table
from attnscale.bench.static.tile_table import FILE as TILES
from attnscale.bench.static.tile_table import write_tiles


def main() -> int:
    """The exit code is 1 where a kernel got worse than the table says."""
    parser = argparse.ArgumentParser(prog="python -m attnscale.bench.static", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--quick", action="store_true", help="each variant for one of the targets in turn")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--tiles", action="store_true", help=f"only compile tiles of choice, and write {TILES.name}")
    parser.add_argument("--misses", action="store_true", help=f"only print which goals {FILE.name} misses")
    options = parser.parse_args()
    if options.misses:
        sys.stdout.write(json.dumps(misses(static_table()), indent=1, ensure_ascii=False) + "\n")
        return 0
    if options.tiles:
        write_tiles()
        return 0
    if options.write and options.quick:
        parser.error("--quick leaves rows out: it compares, and writes nothing")
    found = build_table(jobs(all_targets=not options.quick), options.workers)
    if options.write:
        write_table(found)
        return 0
    known = {row.key: row for row in read_table().rows}
    worse = [f"{row.key}: {what}" for row in found.rows for what in differences(known.get(row.key, row), row)]
    sys.stdout.write("\n".join([*worse, f"{len(found.rows)} kernels, {len(worse)} differences", ""]))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
