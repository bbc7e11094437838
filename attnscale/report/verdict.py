"""The verdict: two sentences that say what the best law gains in retrieval, and what it costs in prose."""

from __future__ import annotations

from collections.abc import Callable

from attnscale.lab.results import CONSTANT
from attnscale.report.chart import bits, percent, points, short
from attnscale.report.evaluation_data import ARGMAX, PROSE, EvaluationData, ResultRow

NOTICED = 0.0005  # bits per byte; less is shown as 0.00


def verdict(data: EvaluationData) -> list[str]:
    """One or two sentences, as honest as the numbers allow: a gain is one whose 95 % interval leaves out zero."""
    if CONSTANT not in data.policies:
        return [f"Nothing was measured with the policy {CONSTANT}, so there is nothing to compare the laws with."]
    task = next(iter(data.retrieval_tasks), None)
    prose = _by_length(data, PROSE)
    if task is None:
        return [_prose_alone(data, prose), "Retrieval was not measured, so what a law gains there is unknown."]
    retrieval = _by_length(data, task)
    if not retrieval:
        return ["No law was measured beside the policy constant."]
    length = max(retrieval)
    best = max(retrieval[length], key=lambda row: (_sign(row) > 0, row.value))
    return [_retrieval(data, task, retrieval, best), _price(data, prose, best)]


def _by_length(data: EvaluationData, task: str) -> dict[int, list[ResultRow]]:
    """The laws that can be compared with `constant`."""
    rows, found = data.whole(task), dict[int, list[ResultRow]]()
    for (policy, length), row in rows.items():
        if policy not in (CONSTANT, ARGMAX) and (CONSTANT, length) in rows:
            found.setdefault(length, []).append(row)
    return found


def _sign(row: ResultRow) -> int:
    """1 or −1 if the paired difference is beyond the noise, 0 if it may be none or has no interval."""
    if row.difference_low is None or row.difference_high is None:
        return 0
    return 1 if row.difference_low > 0 else -1 if row.difference_high < 0 else 0


def _where(data: EvaluationData, length: int) -> str:
    trained = data.trained_length
    if trained is None:
        return f"At {length} tokens"
    if length == trained:
        return f"At {length} tokens, the trained length"
    return f"At {length} tokens, {short(length / trained)} times the trained length"


def _constant(data: EvaluationData) -> str:
    """How `constant` is called: it is ordinary attention unless run.json gives it another β."""
    policies = data.run.get("policies")
    known = policies.get(CONSTANT) if isinstance(policies, dict) else None
    beta = known.get("beta", 1) if isinstance(known, dict) else 1
    return f"β = {beta:g}" if isinstance(beta, (int, float)) and abs(beta) < 1e9 else CONSTANT


def _retrieval(data: EvaluationData, task: str, retrieval: dict[int, list[ResultRow]], best: ResultRow) -> str:
    rows, length = data.whole(task), best.length
    base, where, laws = rows[CONSTANT, length].value, _where(data, length), len(retrieval[length])
    gained = points(best.value - base if best.difference is None else best.difference)
    interval = _interval(best, points)
    answers = f"{percent(best.value)} of the questions where {_constant(data)} answers {percent(base)}"
    of = f", the best of {laws} laws," if laws > 1 else ""
    if _sign(best) > 0:
        times = f"{short(best.value / base, 2)}×, " if base > 0 and best.value / base >= 1.1 else ""
        return f"{where}, {best.policy}{of} answers {answers} ({times}{gained} points more, {interval})."
    if interval == "":
        return f"{where}, {best.policy}{of} answers {answers}; with so few samples this may be noise."
    if _sign(best) < 0:
        return f"{where}, no law helps: {best.policy}{of} answers {answers} ({gained} points, {interval})."
    differs = "differs from" if not any(_sign(row) for row in retrieval[length]) else "is better than"
    return (
        f"{where}, no law {differs} {CONSTANT} beyond the noise: {best.policy}{of} answers {answers} "
        f"({gained} points, {interval}).{_shorter(data, task, retrieval, length)}"
    )


def _shorter(data: EvaluationData, task: str, retrieval: dict[int, list[ResultRow]], longest: int) -> str:
    """The longest length at which a law does help, where none does at the end."""
    helps = [row for length, rows in retrieval.items() if length < longest for row in rows if _sign(row) > 0]
    if not helps:
        return ""
    row = max(helps, key=lambda row: (row.length, row.value))
    base = data.whole(task)[CONSTANT, row.length].value
    return f" The last gain is at {row.length} tokens: {row.policy} {percent(row.value)}, {CONSTANT} {percent(base)}."


def _price(data: EvaluationData, prose: dict[int, list[ResultRow]], best: ResultRow) -> str:
    own = {length: row for length, rows in prose.items() for row in rows if row.policy == best.policy}
    own = {length: row for length, row in own.items() if row.difference is not None}
    if not own:
        return "Bits per byte were not measured, so what it costs in prose is unknown."
    row = own.get(best.length) or own[max(own)]
    there = "there" if row.length == best.length else f"at {row.length} tokens"
    lost, interval = row.difference or 0.0, _interval(row, bits)
    if abs(lost) < NOTICED:
        change = f"costs no bits per byte of prose {there}"
    elif interval and _sign(row) == 0:
        change = f"changes prose {there} by {bits(lost)} bits per byte, within the noise ({interval})"
    else:
        interval = _interval(row, bits, 1 if lost > 0 else -1) or "no interval: too few samples"
        change = f"{'costs' if lost > 0 else 'saves'} {bits(abs(lost))} bits per byte of prose {there} ({interval})"
    return f"{best.policy} {change}{_within(data, own)}."


def _within(data: EvaluationData, own: dict[int, ResultRow]) -> str:
    """What it costs up to the trained length."""
    trained = data.trained_length
    inside = [row.difference or 0.0 for length, row in own.items() if trained is not None and length <= trained]
    if not inside:
        return ""
    worst = max(inside)
    if max(map(abs, inside)) < NOTICED:
        return ", and nothing up to the trained length"
    return f", and {'at most ' if worst > 0 else ''}{bits(worst)} up to the trained length"


def _prose_alone(data: EvaluationData, prose: dict[int, list[ResultRow]]) -> str:
    if not prose:
        return "Neither retrieval nor bits per byte were measured under constant and a law."
    length = max(prose)
    best = min(prose[length], key=lambda row: row.value)
    base = data.whole(PROSE)[CONSTANT, length].value
    numbers = f"{bits(best.value)} bits per byte of prose where {_constant(data)} needs {bits(base)}"
    interval = _interval(best, bits)
    aside = f" (difference {bits(best.value - base)}{', ' + interval if interval else ''})"
    if _sign(best) < 0:
        return f"{_where(data, length)}, {best.policy} needs {numbers}{aside}."
    noise = f"no law needs less than {CONSTANT} beyond the noise"
    return f"{_where(data, length)}, {noise}: {best.policy} needs {numbers}{aside}."


def _interval(row: ResultRow, text: Callable[[float], str], sign: int = 1) -> str:
    """The interval of the paired difference, or nothing where there is none."""
    if row.difference_low is None or row.difference_high is None:
        return ""
    low, high = sorted((sign * row.difference_low, sign * row.difference_high))
    return f"95 % interval {text(low)} to {text(high)}"
