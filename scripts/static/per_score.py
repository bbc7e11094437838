"""Instructions per score of a kernel, by phase and for whole calls, and missed goals."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.static.calls import Passes, passes, sequences, visible_scores
from scripts.static.counts import Counts
from scripts.static.table import REFERENCE, KernelRow, baseline
from scripts.static.targets import TARGETS

BY_KEYS = "backward dK dV"  # programs of this family own keys and step through rows
GROUP = 4  # query heads per key head in the table

HOT_OVER_REFERENCE = 1.05
ENTROPY_OVER_PLAIN = 1.12
CALL_OVER_HOT = 1.10  # for a causal call with 1024 keys
CAUSAL = ("causal, plain", "causal, entropy", "causal", "causal, dbeta")


def per_score(row: KernelRow, counts: Counts) -> float:
    """Return the instructions of all threads of a block per score of a tile."""
    return counts.total * row.warps * row.lanes / (row.tile[0] * row.tile[1])


def edge(row: KernelRow) -> Counts:
    """Return the longer of the edge loops."""
    return max(row.phases.before, row.phases.after, key=lambda counts: counts.total)


def per_visible_score(row: KernelRow, length: int) -> float | None:
    """Return the loop instructions of a call per visible score; None for kernels without a visibility rule."""
    if not row.rule:
        return None
    return _of_call(row, length) * row.warps * row.lanes / visible_scores(row.rule, length)


def with_the_rest(row: KernelRow, length: int) -> float | None:
    """Return an upper bound of instructions per visible score, including those outside the tile loops.

    It is an upper bound because compilers peel the first and last iterations of a loop, which are then counted twice,
    and because all branches count as taken. A dK/dV program serves `GROUP` heads.
    """
    of_loops = per_visible_score(row, length)
    if of_loops is None:
        return None
    by_keys = row.family == BY_KEYS
    programs = len(sequences(row.rule, length)) * -(-length // row.tile[by_keys])
    rest = programs * (row.phases.around.total + row.phases.once / (GROUP if by_keys else 1))
    return of_loops + rest * row.warps * row.lanes / visible_scores(row.rule, length)


def over_all_hot(row: KernelRow, rows: list[KernelRow], length: int) -> float | None:
    """Return the instructions of a call relative to a call with all visible tiles in the hot loop.

    If the kernel has no hot loop, the hot loop of the causal variant is used. None if there is none either.
    """
    hot = next((other for other in (row, *_causal(row, rows)) if other.phases.hot.total), None)
    if not row.rule or hot is None:
        return None
    needed = _tiles(row, length).needed * row.tile[0] * row.tile[1]
    return _of_call(row, length) * row.warps * row.lanes / (needed * per_score(hot, hot.phases.hot))


def over_reference(row: KernelRow, rows: list[KernelRow]) -> float | None:
    """Return the instructions per score of a forward kernel relative to the plain kernel at its best tile."""
    wanted = row._replace(family=REFERENCE, name="causal, plain").key
    plain = next((other for other in rows if other.key == wanted), None)
    if row.family != "forward" or plain is None:
        return None
    return per_score(row, row.loop) / per_score(plain, plain.phases.hot)


def _causal(row: KernelRow, rows: list[KernelRow]) -> list[KernelRow]:
    wanted = row._replace(name=row.name.replace(row.rule, "causal", 1)).key
    return [other for other in rows if other.key == wanted]


def _of_call(row: KernelRow, length: int) -> int:
    """Return the instructions of a warp in all tiles of one head."""
    tiles, phases = _tiles(row, length), row.phases
    return sum(getattr(tiles, name) * getattr(phases, name).total for name in ("before", "hot", "after"))


def _tiles(row: KernelRow, length: int) -> Passes:
    return passes(row.rule, length, row.tile, by_keys=row.family == BY_KEYS, classified=row.phases.hot.total > 0)


def misses(rows: list[KernelRow]) -> dict[str, str]:
    """Return missed goals by goal and kernel, with the value that should be lower."""
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
    """Return the instructions per score with statistics relative to without; None without statistics."""
    plain = baseline(row, rows)
    return None if plain is None else per_score(row, row.loop) / per_score(plain, plain.loop)


def _call(row: KernelRow, rows: list[KernelRow]) -> float | None:
    ours = row.family in ("forward", "backward dQ", "backward dK dV") and row.dtype == "bf16"
    return over_all_hot(row, rows, 1024) if ours and row.name in CAUSAL else None
