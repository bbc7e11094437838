"""Instructions of a kernel for each score, by phase and of whole calls, and which goals they miss."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.static.calls import Passes, passes, sequences, visible_scores
from scripts.static.counts import Counts
from scripts.static.table import REFERENCE, KernelRow, baseline
from scripts.static.targets import TARGETS

BY_KEYS = "backward dK dV"  # the family whose programs take keys, and step through rows
GROUP = 4  # query heads of a key head in the variants of the table

HOT_OVER_REFERENCE = 1.05
ENTROPY_OVER_PLAIN = 1.12
CALL_OVER_HOT = 1.10  # of a causal call with 1024 keys
CAUSAL = ("causal, plain", "causal, entropy", "causal", "causal, dbeta")


def per_score(row: KernelRow, counts: Counts) -> float:
    """Of the threads of a block together, for each score of a tile."""
    return counts.total * row.warps * row.lanes / (row.tile[0] * row.tile[1])


def edge(row: KernelRow) -> Counts:
    """The longer of the loops for tiles at an edge."""
    return max(row.phases.before, row.phases.after, key=lambda counts: counts.total)


def per_visible_score(row: KernelRow, length: int) -> float | None:
    """Of all loops of a call, for each score that counts; None for kernels without a rule of visibility."""
    if not row.rule:
        return None
    return _of_call(row, length) * row.warps * row.lanes / visible_scores(row.rule, length)


def with_the_rest(row: KernelRow, length: int) -> float | None:
    """At most as many instructions for each score that counts if those outside of the loops over tiles are added.

    At most: compilers write the first and last tiles of a loop outside of it, which are counted in both places, and all
    branches as if they were taken. A program of dK and dV serves `GROUP` heads.
    """
    of_loops = per_visible_score(row, length)
    if of_loops is None:
        return None
    by_keys = row.family == BY_KEYS
    programs = len(sequences(row.rule, length)) * -(-length // row.tile[by_keys])
    rest = programs * (row.phases.around.total + row.phases.once / (GROUP if by_keys else 1))
    return of_loops + rest * row.warps * row.lanes / visible_scores(row.rule, length)


def over_all_hot(row: KernelRow, rows: list[KernelRow], length: int) -> float | None:
    """Instructions of a call over those if every tile with a score that counts ran in the hot loop.

    Where a kernel has none, the hot loop is that of the same kernel under the causal rule. None where there is none
    either.
    """
    hot = next((other for other in (row, *_causal(row, rows)) if other.phases.hot.total), None)
    if not row.rule or hot is None:
        return None
    needed = _tiles(row, length).needed * row.tile[0] * row.tile[1]
    return _of_call(row, length) * row.warps * row.lanes / (needed * per_score(hot, hot.phases.hot))


def over_reference(row: KernelRow, rows: list[KernelRow]) -> float | None:
    """Instructions for a score in most tiles of a forward, over those of the plain kernel at its best tile."""
    wanted = row._replace(family=REFERENCE, name="causal, plain").key
    plain = next((other for other in rows if other.key == wanted), None)
    if row.family != "forward" or plain is None:
        return None
    return per_score(row, row.loop) / per_score(plain, plain.phases.hot)


def _causal(row: KernelRow, rows: list[KernelRow]) -> list[KernelRow]:
    wanted = row._replace(name=row.name.replace(row.rule, "causal", 1)).key
    return [other for other in rows if other.key == wanted]


def _of_call(row: KernelRow, length: int) -> int:
    """Instructions of a warp in all tiles of one head."""
    tiles, phases = _tiles(row, length), row.phases
    return sum(getattr(tiles, name) * getattr(phases, name).total for name in ("before", "hot", "after"))


def _tiles(row: KernelRow, length: int) -> Passes:
    return passes(row.rule, length, row.tile, by_keys=row.family == BY_KEYS, classified=row.phases.hot.total > 0)


def misses(rows: list[KernelRow]) -> dict[str, str]:
    """What is missed, by goal and kernel, with the figure that should be lower."""
    return {
        f"{goal}: {row.family} {row.dtype} D{row.dim} {row.name} {row.target}": figure
        for row in rows
        for goal, figure in _missed(row, rows)
    }


def _missed(row: KernelRow, rows: list[KernelRow]) -> Iterator[tuple[str, str]]:
    room = TARGETS[row.target].resources.shared_memory
    if row.shared_memory > room:
        yield f"shared memory ≤ {room}", str(row.shared_memory)
    if row.spills and row.family.startswith(("forward", "backward")):
        yield "no spills", str(row.spills)
    ratios = {
        f"hot loop ≤ {HOT_OVER_REFERENCE} of the plain kernel": (_hot(row, rows), HOT_OVER_REFERENCE),
        f"entropy ≤ {ENTROPY_OVER_PLAIN} of the loop without": (over_plain(row, rows), ENTROPY_OVER_PLAIN),
        f"causal call of 1024 ≤ {CALL_OVER_HOT:.2f} of all hot": (_call(row, rows), CALL_OVER_HOT),
    }
    for goal, (ratio, limit) in ratios.items():
        if ratio is not None and ratio > limit:
            yield goal, f"{ratio:.3f}"


def _hot(row: KernelRow, rows: list[KernelRow]) -> float | None:
    return over_reference(row, rows) if row.name == "causal, plain" else None


def over_plain(row: KernelRow, rows: list[KernelRow]) -> float | None:
    """Instructions for a score of a kernel with statistics, over those of the same without; None where it has none."""
    plain = baseline(row, rows)
    return None if plain is None else per_score(row, row.loop) / per_score(plain, plain.loop)


def _call(row: KernelRow, rows: list[KernelRow]) -> float | None:
    ours = row.family in ("forward", "backward dQ", "backward dK dV") and row.dtype == "bf16"
    return over_all_hot(row, rows, 1024) if ours and row.name in CAUSAL else None
