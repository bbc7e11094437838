"""The life of events: a problem must last or be sudden to begin one, takes its consequences, and ends when it is gone.

All heads with the same cause form one event. Consequences of an open event raise no events of their own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnscale.diagnostics.events.causes import CAUSES, Thresholds
from attnscale.diagnostics.events.rules import FIRST_REPORTS, KEPT, Head, Place, Report, Signals, Symptom
from attnscale.diagnostics.records.record import Event, Record
from attnscale.diagnostics.tracking import ORIGINS

SETTLED = 20  # reports after which a jump that did not grow further is the new normal


class _Sightings(NamedTuple):
    """Reports with and without a symptom of a head, and the step of the first one."""

    first: int
    reports: deque[bool]


@dataclass
class _Open:
    """An open event."""

    event: Event
    places: dict[Place, Symptom]
    reports: int = 0
    quiet: int = 0
    peak: float = 0.0
    settled: int = 0  # reports since the value last grew


class EventLog:
    """Recognises the events of a run, report by report.

    Example:
        >>> from attnscale.diagnostics import Record, Summary
        >>> def report(step, logit):
        ...     largest = Summary(mean=0.1, p10=0.0, p50=0.1, p90=0.2, min=0.0, max=logit, rows=64)
        ...     return [Record(step, "layers.0", 3, forward={"max_logit": largest})]
        >>> log = EventLog()
        >>> quiet = [log.update(step, report(step, 0.7)) for step in range(0, 100, 10)]
        >>> any(quiet), log.update(100, report(100, 9.9))[0].message
        (False, 'the largest logit jumped from 0.7 to 9.9 (14×) in all heads of layers.0, since step 100')
    """

    def __init__(self, limits: Thresholds | None = None) -> None:
        self.limits = limits or Thresholds()
        self._heads: dict[Place, Head] = defaultdict(Head)
        self._seen: dict[str, dict[Place, _Sightings]] = {cause: {} for cause in CAUSES}
        self._open: dict[str, _Open] = {}
        self._number = 0
        self._step: int | None = None  # of the last report
        self._rates: deque[float] = deque(maxlen=KEPT)

    @property
    def open(self) -> list[Event]:
        """The events that are not over."""
        return [one.event for one in self._open.values()]

    def update(
        self, step: int, records: Sequence[Record], rate: float | None = None, *, weights_finite: bool = False
    ) -> list[Event]:
        """Apply the rules to a report.

        Args:
            step: step of the report.
            records: the records of all heads.
            rate: learning rate of the step, if known.
            weights_finite: the weights of the model are known to be finite after the update. NaN in gradients is then a
                warning: the update was skipped.

        Returns:
            Events that begin, change or end at this step.
        """
        now = {(record.layer, record.head): Signals.of(record) for record in records}
        faults = {
            (record.layer, record.head): tuple(
                int(record.scalars.get(name, default))
                for name, default in (
                    ("broken_step", step),
                    ("broken_call", 0),
                    ("broken_origin", 0),
                    ("broken_row", 0),
                )
            )
            for record in records
            if "broken_row" in record.scalars
        }
        concerned = {cause: frozenset(one.places) for cause, one in self._open.items()}
        interval = 1 if self._step is None else max(1, step - self._step)
        report = Report(step, now, self._heads, concerned, faults, interval, weights_finite)  # type: ignore[arg-type]
        self._step = step
        messages: dict[int, Event] = {}
        for cause, about in CAUSES.items():
            limit = 0.0 if about.limit is None else getattr(self.limits, about.limit)
            found = {} if limit is None else about.rule(report, limit)
            symptoms = self._confirmed(step, cause, found, about.sudden)
            if symptoms:
                self._note(cause, symptoms, report, messages, rate)
        self._finish(step, messages)
        # A history with the problem in it would hide the problem.
        troubled = {place for one in self._open.values() for place in one.places}
        troubled |= {place for seen in self._seen.values() for place, one in seen.items() if one.reports[-1]}
        for place, signals in now.items():
            if place not in troubled and place not in faults:
                self._heads[place].add(signals)
        if rate is not None:
            self._rates.append(rate)
        return list(messages.values())

    def _confirmed(self, step: int, cause: str, symptoms: dict[Place, Symptom], sudden: bool) -> dict[Place, Symptom]:
        """Return the symptoms that enough of the last reports show."""
        limits, memory = self.limits, self._seen[cause]
        for place in {*memory, *symptoms}:
            memory.setdefault(place, _Sightings(step, deque(maxlen=limits.window))).reports.append(place in symptoms)
        self._seen[cause] = {place: seen for place, seen in memory.items() if any(seen.reports)}

        def enough(seen: _Sightings) -> bool:
            return sudden or (
                sum(seen.reports) >= limits.seen and (limits.seen == 1 or step - seen.first >= limits.steps)
            )

        return {place: symptom for place, symptom in symptoms.items() if enough(memory[place])}

    def _note(
        self, cause: str, symptoms: dict[Place, Symptom], report: Report, messages: dict[int, Event], rate: float | None
    ) -> None:
        known = self._open.get(cause)
        if known is not None:
            self._extend(known, symptoms, report, messages)
            return
        if any(cause in CAUSES[other].explains for other in self._open):
            return
        # A consequence may be confirmed some reports before its cause.
        recent = {
            other: one for other, one in self._open.items() if other in CAUSES[cause].explains and one.reports <= KEPT
        }
        taken = [self._open.pop(other) for other in recent]
        for other in taken[1:]:  # the first one goes on under the new cause
            messages[other.event.number] = replace(other.event, status="over", step=report.step)
        sightings = (self._seen[cause][place].first for place in symptoms)
        start = min([*sightings, *(one.event.start for one in taken)])
        if cause == "nan":
            start = min(report.faults[place][0] for place in symptoms)
        number = taken[0].event.number if taken else self._number
        self._number += not taken
        harmless = cause == "nan" and report.skipped_update
        severity = "critical" if CAUSES[cause].critical and not harmless else "warning"
        event = Event(number, cause, "lasting" if taken else "begun", severity, start, report.step, (), "", "")
        one = _Open(event, dict(symptoms), peak=_largest(symptoms))
        one.event = self._describe(one, report, rate)
        self._open[cause] = one
        messages[number] = one.event

    def _extend(self, one: _Open, symptoms: dict[Place, Symptom], report: Report, messages: dict[int, Event]) -> None:
        """Add a report to an open event; send it again if it spread by half."""
        one.quiet = 0
        if one.event.cause == "nan":  # its consequences spread over the whole model
            if one.event.severity == "warning" and not report.skipped_update:
                advice = CAUSES["nan"].advice
                one.event = replace(one.event, status="lasting", severity="critical", step=report.step, advice=advice)
                messages[one.event.number] = one.event
            return
        largest = _largest(symptoms)
        one.settled = 0 if largest > 1.5 * one.peak else one.settled + 1
        one.peak = max(one.peak, largest)
        before = len(one.places)
        one.places.update(symptoms)
        if len(one.places) >= 1.5 * before:
            one.event = self._describe(one, report, None)
            one.event = replace(one.event, status="lasting", step=report.step)
            messages[one.event.number] = one.event

    def _finish(self, step: int, messages: dict[int, Event]) -> None:
        for cause, one in list(self._open.items()):
            one.reports += 1
            if one.event.number not in messages and not self._seen_now(cause):
                one.quiet += 1
            settled = cause in ("logit_jump", "logit_drop") and one.settled >= SETTLED
            if one.quiet >= self.limits.quiet or settled:
                event = replace(one.event, status="over", step=step)
                messages[event.number] = event
                del self._open[cause]
                for place in one.places:
                    self._heads[place].past.clear()

    def _seen_now(self, cause: str) -> bool:
        return any(seen.reports[-1] for seen in self._seen[cause].values())

    def _describe(self, one: _Open, report: Report, rate: float | None) -> Event:
        """Fill in places, message and advice."""
        event, about = one.event, CAUSES[one.event.cause]
        worst = max(one.places, key=lambda place: _distance(one.places[place]))
        value, usual = one.places[worst]
        times = value / usual if usual else math.inf
        text = about.text.format(value=value, usual=usual, times=times, size="large" if value > usual else "small")
        if math.isnan(usual):  # the problem is as old as the run
            text = text.replace(", usually nan", "").replace("fell from nan to", "is").replace(", nan before", "")
        advice = about.advice
        known: tuple[float | None, float | None] = (value, usual)
        if event.cause == "nan":
            _, _, origin, row = report.faults[worst]
            text, known = f"{text} {_origin(origin)}, row {row},", (None, None)
            if origin == 1 << ORIGINS.index("output gradient"):
                advice = (
                    "Look at the loss and at what follows this layer in the forward pass; the layer itself is sound."
                )
            if event.severity == "warning":
                advice = "No weight was updated with it, as when a GradScaler lowers its scale. If it recurs: " + advice
        places = _grouped(one.places)
        message = f"{text} in {where(places, Counter(layer for layer, _ in report.now))}, since step {event.start}"
        highest = max(self._rates, default=math.inf)
        if rate is not None and len(self._rates) >= FIRST_REPORTS and rate > 3 * highest:
            message += f"; the learning rate is {rate / highest:.0f}× its highest value before"
        return replace(
            event,
            places=places,
            message=message,
            advice=advice,
            quantity=about.quantity,
            value=known[0],
            usual=known[1],
        )


def _origin(bits: int) -> str:
    names = [name for place, name in enumerate(ORIGINS) if bits >> place & 1]
    if names == ["query", "key", "value"]:
        return "in the input of the layer"
    if names == ["scores"]:
        return "in the scores, although query, key and value are finite"
    if names == ["output gradient"]:
        return "in the gradient that arrives"
    if names == ["gradients"]:
        return "in the gradients of query, key and value"
    return f"in the {' and '.join(names)}"


def where(places: Sequence[tuple[str, tuple[int, ...]]], heads: Mapping[str, int]) -> str:
    """Describe places in words. `heads` maps each layer of the model to its number of heads.

    >>> where([("layers.2", (3,))], {"layers.1": 4, "layers.2": 4})
    'head 3 of layers.2'
    >>> where([("layers.1", (0, 1, 2, 3)), ("layers.2", (0, 1, 2, 3))], {"layers.1": 4, "layers.2": 4})
    'all heads of all 2 layers'
    """
    number = sum(len(of_layer) for _, of_layer in places)
    whole = number == sum(heads[layer] for layer, _ in places if layer in heads)
    if len(places) == 1:
        layer, of_layer = places[0]
        if whole:
            return f"all heads of {layer}"
        return f"head{'s' if number > 1 else ''} {', '.join(map(str, of_layer))} of {layer}"
    layers = f"all {len(heads)} layers" if len(places) == len(heads) else f"{len(places)} of {len(heads)} layers"
    if whole:
        return f"all heads of {layers}"
    return f"{number} heads of {layers}, first {places[0][0]}"


def _grouped(places: Iterable[Place]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    groups: dict[str, list[int]] = defaultdict(list)
    for layer, head in places:
        groups[layer].append(head)
    return tuple((layer, tuple(sorted(heads))) for layer, heads in groups.items())


def _distance(symptom: Symptom) -> float:
    """How far a value is from the usual one, as a ratio in either direction."""
    value, usual = symptom
    if math.isnan(value) or math.isnan(usual) or value <= 0 or usual <= 0:
        return 0.0
    return abs(math.log(value / usual))


def _largest(symptoms: Mapping[Place, Symptom]) -> float:
    return max((symptom.value for symptom in symptoms.values() if symptom.value == symptom.value), default=0.0)
