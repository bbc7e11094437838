"""Execute every case on every target and write the tables: `make compiled`, or `python -m compiled [TARGET...]`.

With `--mutations N`, N mutants of each kind and kernel of some cases are executed instead. The rows of these targets
are replaced in the CSV of all mutants, and the tables are written from it.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # compilation runs in processes of its own

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from compiled.cases import CASES, LENGTHS
from compiled.execution import Report, examine
from compiled.launching import ROOT, compile_cases
from compiled.mutation_tables import replace_rows, row_of, tables_of
from compiled.mutations import Outcome, examine_mutants
from scripts.static.calls import visible_scores
from scripts.static.per_score import with_the_rest
from scripts.static.table import static_table
from scripts.static.targets import TARGETS

EXECUTED = ("sm_80", "sm_90", "gfx942")
FAMILIES = {
    "forward": "forward, with the lists of its mask",
    "backward": "rows, dQ with dβ, dK/dV, with the lists of their mask",
    "decode": "decode and merge",
    "gaps": "gap bracket and counts",
    "softmax": "row softmax, forward and backward",
    "stock": "vector add, row softmax, matrix product",
    "counted": "causal calls of 256 and 1024 keys",
}
MUTATED = (
    "stock matrix product bf16",
    "forward bf16 D64 causal",
    "forward bf16 D128 causal",
    "backward bf16 D64 causal",
    "decode bf16 D64 causal, 3 splits",
    "softmax bf16 n = 1024, mask, bias, counts",
    "gaps fp16 D64 causal",
)
# On sm_90, instead: products of a warpgroup and bulk copies, in calls of a few tiles and of many.
MUTATED_ON_SM_90 = (
    "stock matrix product tf32",
    "forward bf16 D64 causal",
    "forward bf16 D128 causal",
    "counted forward bf16 D64 n = 1024",
    "backward bf16 D64 causal",
    "counted backward bf16 D64 n = 1024",
)
README = ROOT / "tests" / "compiled" / "README.md"
MUTANTS = ROOT / ".github" / "assets" / "compiled_mutations.csv"
# A counted kernel: name in the static table.
COUNTED = {
    "flash_forward_kernel": ("forward", "causal, entropy"),
    "flash_backward_query_kernel": ("backward dQ", "causal, dbeta"),
    "flash_backward_key_kernel": ("backward dK dV", "causal"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="python -m compiled", description=__doc__)
    parser.add_argument("targets", nargs="*", default=EXECUTED, help="default: %(default)s")
    parser.add_argument("--mutations", type=int, metavar="N", help="execute mutants instead")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.mutations:
        rows = [row_of(outcome) for target in options.targets for outcome in _mutate(target, options.mutations)]
        write_between(README, "mutations", tables_of(replace_rows(MUTANTS, rows, EXECUTED)))
        return 0
    reports = {target: _examine_all(target) for target in options.targets}
    failed = [report for found in reports.values() for report in found.values() if not report.right]
    if set(options.targets) == set(EXECUTED) and not failed:
        write_between(ROOT / "kernels" / "README.md", "compiled", table_of(reports))
        write_between(README, "counted", counts_of(reports))
    return 1 if failed else 0


def _examine_all(target: str) -> dict[str, Report]:
    kernels = compile_cases(list(CASES), target)
    found = {}
    for name in CASES:
        report = found[name] = examine(name, target, kernels[name])
        executed = sum(sum(counts.values()) for counts in report.counts.values())
        told = "right" if report.right else str(report)
        told += f", {report.known} known findings" if report.known else ""
        sys.stdout.write(f"{target}: {name}: {told}, {executed} instructions\n")
        sys.stdout.flush()
    return found


def table_of(reports: dict[str, dict[str, Report]]) -> str:
    """Cases, launches and executed instructions of a warp by family and target."""
    lines = [
        f"| kernels | cases | launches | {' | '.join(f'{target}: instructions of a warp' for target in reports)} |",
        "|---|---|---|" + "---|" * len(reports),
    ]
    for family, told in FAMILIES.items():
        names = [case.name for case in CASES.values() if case.family == family]
        launches = sum(next(iter(reports.values()))[name].launches for name in names)
        executed = [
            sum(sum(counts.values()) for name in names for counts in found[name].counts.values())
            for found in reports.values()
        ]
        cells = " | ".join(f"{count / 1e6:.2f} M" for count in executed)
        lines.append(f"| {told} | {len(names)} | {launches} | {cells} |")
    return "\n".join(lines)


def counts_of(reports: dict[str, dict[str, Report]]) -> str:
    """Executed instructions per visible score beside those of the static table."""
    header = [f"n = {n}: {what}" for n in LENGTHS for what in ("executed", "table")]
    lines = ["| causal, bf16 | " + " | ".join(header) + " |", "|---|" + "---|" * len(header)]
    for target, found in reports.items():
        for kernel, (family, name) in COUNTED.items():
            for dim in (64, 128):
                row = next(row for row in static_table() if row.key == (family, name, "bf16", dim, target))
                call = "forward" if family == "forward" else "backward"
                cells = []
                for n in LENGTHS:
                    executed = sum(found[f"counted {call} bf16 D{dim} n = {n}"].counts[kernel].values())
                    cells.append(f"{executed * TARGETS[target].resources.warp_size / visible_scores('causal', n):.1f}")
                    expected = with_the_rest(row, n)
                    cells.append("" if expected is None else f"{expected:.1f}")
                lines.append(f"| {target} {family} D{dim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mutate(target: str, each: int) -> Iterator[Outcome]:
    """Run the mutants of a target and print the survivors."""
    for name in MUTATED_ON_SM_90 if target == "sm_90" else MUTATED:
        for outcome in examine_mutants(name, target, each):
            if outcome.reason is not None:
                where = f"{target}: {name}, {outcome.kernel.name}, line {outcome.mutant.line}"
                sys.stdout.write(f"{where}: {outcome.mutant.kind}: {outcome.reason.words}\n")
                sys.stdout.flush()
            yield outcome


def write_between(file: Path, name: str, text: str) -> None:
    """Replace the text between two markers of a file."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, _, rest = file.read_text().partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{file} has no markers {start} and {end}")
    file.write_text(f"{before}{start}\n{text}\n{end}{after}")


if __name__ == "__main__":
    sys.exit(main())
