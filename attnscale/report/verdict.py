"""The verdict: the gain of the best policy in retrieval, its cost in bits per byte, and the line that applies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnscale.lab.results import CONSTANT
from attnscale.report.chart import bits, percent, points, short
from attnscale.report.evaluation_data import ARGMAX, NOTHING, PROSE, EvaluationData, ResultRow

NOTICED = 0.0005  # bits per byte; smaller changes are displayed as 0.00


class Verdict(NamedTuple):
    """Sentences for page and terminal, and the call that applies the policy that was shown to help, if any."""

    sentences: list[str]
    line: str | None = None

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *([] if self.line is None else [self.line])])


def verdict(data: EvaluationData) -> Verdict:
    """Return the verdict. A gain is significant if its 95 % interval excludes zero."""
    if CONSTANT not in data.policies:
        return Verdict([f"The policy {CONSTANT} was not measured, so there is no baseline to compare with."])
    task, prose = next(iter(data.retrieval_tasks), None), _by_length(data, PROSE)
    answers = {} if task is None else data.answers(task)
    beyond = _beyond(task, answers) if task is not None and max(answers.values()) <= NOTHING else ""
    idle = _idle(data)
    others = [policy for policy in data.policies if policy not in (CONSTANT, ARGMAX)]
    if others and set(others) <= set(data.idle):
        return Verdict([idle, *([beyond] if beyond else [])])
    sentences = [idle] if idle else []
    if task is None or beyond:
        first, line = _prose_alone(data, prose)
        if task is None:
            return Verdict([first, "Retrieval was not measured.", *sentences], line)
        return Verdict([beyond, *([first] if prose else []), *sentences], line)
    retrieval = _by_length(data, task)
    if not retrieval:
        return Verdict([f"Only the policy {CONSTANT} was measured.", *sentences])
    length = max(length for length in retrieval if answers[length] > NOTHING or length == min(retrieval))
    if length < max(retrieval):
        sentences.append(f"Beyond {length} tokens, no policy answers more than {percent(NOTHING)} of the questions.")
    best = max(retrieval[length], key=lambda row: (_sign(row) > 0, row.value))
    helped = _sign(best) > 0 and answers[length] > NOTHING
    line = apply_line(data, best.policy) if helped else None
    return Verdict([_retrieval(data, task, retrieval, best), _price(data, prose, best), *sentences], line)


def _beyond(task: str, answers: Mapping[int, float]) -> str:
    """Return the sentence on a task of which the model answers nothing."""
    most = max(answers.values())
    what = "any question" if most == 0 else f"more than {percent(most)} of the questions"
    return (
        f"{task} is beyond this model: no policy answers {what} at any length, from {min(answers)} tokens on. No "
        "policy is better than another in this task; try an easier one, such as needle, or other templates."
    )


def _idle(data: EvaluationData) -> str:
    """Return the sentence on policies that cannot differ from `constant`, or an empty string."""
    if not data.idle:
        return ""
    return (
        f"Nothing longer than {data.lengths[-1]} tokens was measured, which is within the reference length of "
        f"{', '.join(data.idle)}: with a floor, β = 1 in every row, so nothing can differ from {CONSTANT}. Measure "
        "longer sequences."
    )


def apply_line(data: EvaluationData, policy: str) -> str | None:
    """Return the call of `attnscale.hf.apply` with a policy as in this run; None if run.json does not describe it."""
    policies, spec = data.run.get("policies"), data.run.get("spec")
    law = policies.get(policy) if isinstance(policies, Mapping) else None
    if not isinstance(law, Mapping) or law.get("name") == "own":
        return None
    law, spec = dict(law), spec if isinstance(spec, Mapping) else {}
    rope = law.pop("rope", None)
    name = law.pop("name", None)
    first = _literal(law if name is None else name)
    keywords: dict[str, Any] = {} if name is None else law
    keywords |= {"layers": spec["layers"]} if spec.get("layers", "all") != "all" else {}
    keywords |= {"on_existing": spec["on_existing"]} if spec.get("on_existing", "raise") != "raise" else {}
    call = ", ".join(["model", first, *(f"{key}={_literal(value)}" for key, value in keywords.items())])
    stretched = "" if rope in (None, "own") else f"  # on the embedding stretched by {rope}, without YaRN's own factor"
    return f"attnscale.hf.apply({call}){stretched}"


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _by_length(data: EvaluationData, task: str) -> dict[int, list[ResultRow]]:
    """Return the rows that can be compared with `constant`, by length."""
    rows, found = data.whole(task), dict[int, list[ResultRow]]()
    for (policy, length), row in rows.items():
        if policy not in (CONSTANT, ARGMAX, *data.idle) and (CONSTANT, length) in rows:
            found.setdefault(length, []).append(row)
    return found


def _sign(row: ResultRow) -> int:
    """Return 1 or −1 for a significant paired difference, 0 otherwise or without an interval."""
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
    """Return the name of `constant` in sentences: "β = 1" unless run.json has another β."""
    policies = data.run.get("policies")
    known = policies.get(CONSTANT) if isinstance(policies, dict) else None
    beta = known.get("beta", 1) if isinstance(known, dict) else 1
    return f"β = {beta:g}" if isinstance(beta, (int, float)) and abs(beta) < 1e9 else CONSTANT


def _retrieval(data: EvaluationData, task: str, retrieval: dict[int, list[ResultRow]], best: ResultRow) -> str:
    rows, length = data.whole(task), best.length
    base, where, laws = rows[CONSTANT, length].value, _where(data, length), len(retrieval[length])
    gained = points(best.value - base if best.difference is None else best.difference)
    interval = _interval(best, points)
    answers = f"{percent(best.value)} of the questions, compared with {percent(base)} for {_constant(data)}"
    of = f", the best of {laws} policies," if laws > 1 else ""
    if _sign(best) > 0:
        times = f"{short(best.value / base, 2)}×, " if base > 0 and best.value / base >= 1.1 else ""
        return f"{where}, {best.policy}{of} answers {answers} ({times}+{gained} points, {interval})."
    if interval == "":
        return f"{where}, {best.policy}{of} answers {answers}. There are too few samples for an interval."
    if _sign(best) < 0:
        return f"{where}, no policy helps: {best.policy}{of} answers {answers} ({gained} points, {interval})."
    differs = "differs significantly from" if not any(map(_sign, retrieval[length])) else "is significantly better than"
    return (
        f"{where}, no policy {differs} {CONSTANT}: {best.policy}{of} answers {answers} "
        f"({gained} points, {interval}).{_shorter(data, task, retrieval, length)}"
    )


def _shorter(data: EvaluationData, task: str, retrieval: dict[int, list[ResultRow]], longest: int) -> str:
    """Return a sentence on the longest length with a significant gain, or an empty string."""
    helps = [row for length, rows in retrieval.items() if length < longest for row in rows if _sign(row) > 0]
    if not helps:
        return ""
    row = max(helps, key=lambda row: (row.length, row.value))
    base = data.whole(task)[CONSTANT, row.length].value
    return (
        f" The longest length with a significant gain is {row.length} tokens: {row.policy} {percent(row.value)}, "
        f"{CONSTANT} {percent(base)}."
    )


def _price(data: EvaluationData, prose: dict[int, list[ResultRow]], best: ResultRow) -> str:
    own = {length: row for length, rows in prose.items() for row in rows if row.policy == best.policy}
    own = {length: row for length, row in own.items() if row.difference is not None}
    if not own:
        return "Bits per byte were not measured."
    row = own.get(best.length) or own[max(own)]
    there = f"at {'this length' if row.length == best.length else f'{row.length} tokens'}"
    lost, interval = row.difference or 0.0, _interval(row, bits)
    if abs(lost) < NOTICED:
        change = f"costs no bits per byte of text {there}"
    elif interval and _sign(row) == 0:
        change = f"changes bits per byte of text {there} by {bits(lost)}, which is not significant ({interval})"
    else:
        interval = _interval(row, bits, 1 if lost > 0 else -1) or "too few samples for an interval"
        change = f"{'costs' if lost > 0 else 'saves'} {bits(abs(lost))} bits per byte of text {there} ({interval})"
    return f"{best.policy} {change}{_within(data, own)}."


def _within(data: EvaluationData, own: dict[int, ResultRow]) -> str:
    """Return the clause on the cost up to the trained length, or an empty string."""
    trained = data.trained_length
    inside = [row.difference or 0.0 for length, row in own.items() if trained is not None and length <= trained]
    if not inside:
        return ""
    worst = max(inside)
    if max(map(abs, inside)) < NOTICED:
        return ", and none up to the trained length"
    return f", and {'at most ' if worst > 0 else ''}{bits(worst)} up to the trained length"


def _prose_alone(data: EvaluationData, prose: dict[int, list[ResultRow]]) -> tuple[str, str | None]:
    """Return the sentence on bits per byte, and the line that applies the best policy if it helps."""
    if not prose:
        return f"Neither retrieval nor bits per byte were measured for {CONSTANT} and another policy.", None
    length = max(prose)
    best = min(prose[length], key=lambda row: row.value)
    base = data.whole(PROSE)[CONSTANT, length].value
    numbers = f"{bits(best.value)} bits per byte of text, compared with {bits(base)} for {_constant(data)}"
    interval = _interval(best, bits)
    aside = f" (difference {bits(best.value - base)}{', ' + interval if interval else ''})"
    if _sign(best) < 0:
        return f"{_where(data, length)}, {best.policy} needs {numbers}{aside}.", apply_line(data, best.policy)
    none = f"no policy is significantly better than {CONSTANT}"
    return f"{_where(data, length)}, {none}: {best.policy} needs {numbers}{aside}.", None


def _interval(row: ResultRow, text: Callable[[float], str], sign: int = 1) -> str:
    """Format the interval of the paired difference; empty if there is none."""
    if row.difference_low is None or row.difference_high is None:
        return ""
    low, high = sorted((sign * row.difference_low, sign * row.difference_high))
    return f"95 % interval {text(low)} to {text(high)}"
