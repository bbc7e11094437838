"""What the kernels should reach by their instructions, spills and shared memory, and where they do not."""

from __future__ import annotations

from collections.abc import Iterator

from attnscale.bench.static.per_score import over_all_hot, over_reference, per_score
from attnscale.bench.static.table import Row, baseline
from attnscale.bench.static.targets import TARGETS

HOT_OVER_REFERENCE = 1.05
ENTROPY_OVER_PLAIN = 1.12
CALL_OVER_HOT = 1.10  # of a causal call with 1024 keys
CAUSAL = ("causal, plain", "causal, entropy", "causal", "causal, dbeta")


def misses(rows: list[Row]) -> dict[str, str]:
    """What is missed, by goal and kernel, with the figure that should be lower."""
    return {
        f"{goal}: {row.family} {row.dtype} D{row.dim} {row.name} {row.target}": figure
        for row in rows
        for goal, figure in _missed(row, rows)
    }


def _missed(row: Row, rows: list[Row]) -> Iterator[tuple[str, str]]:
    room = TARGETS[row.target].resources.shared_memory
    if row.shared_memory > room:
        yield f"shared memory ≤ {room}", str(row.shared_memory)
    if row.spills and row.family.startswith(("forward", "backward")):
        yield "no spills", str(row.spills)
    ratios = {
        f"hot loop ≤ {HOT_OVER_REFERENCE} of the plain kernel": (_hot(row, rows), HOT_OVER_REFERENCE),
        f"entropy ≤ {ENTROPY_OVER_PLAIN} of the loop without": (_entropy(row, rows), ENTROPY_OVER_PLAIN),
        f"causal call of 1024 ≤ {CALL_OVER_HOT:.2f} of all hot": (_call(row, rows), CALL_OVER_HOT),
    }
    for goal, (ratio, limit) in ratios.items():
        if ratio is not None and ratio > limit:
            yield goal, f"{ratio:.3f}"


def _hot(row: Row, rows: list[Row]) -> float | None:
    return over_reference(row, rows) if row.name == "causal, plain" else None


def _entropy(row: Row, rows: list[Row]) -> float | None:
    plain = baseline(row, rows)
    return None if plain is None else per_score(row, row.loop) / per_score(plain, plain.loop)


def _call(row: Row, rows: list[Row]) -> float | None:
    ours = row.family in ("forward", "backward dQ", "backward dK dV") and row.dtype == "bf16"
    return over_all_hot(row, rows, 1024) if ours and row.name in CAUSAL else None
