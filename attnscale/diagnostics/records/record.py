"""Records (one per layer, head and step), and what a monitor reports beside them: the run, its progress, its events."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

FORMAT = 1  # version of the file format
SHOWN_LAYERS = 3  # in `Event.where`
SHOWN_HEADS = 6
# Kinds of alerts in files without a header, with cause and quantity. Their position is the number of the event.
OLD_KINDS = {
    "diffuse": ("diffuse", "relative_entropy"),
    "collapsed": ("collapse", "w_max"),
    "noise": ("noise", "prominence"),
    "exploding": ("exploding", "max_logit"),
    "vanishing": ("vanishing", "gain"),
    "mismatch": ("mismatch", "mismatch"),
    "broken": ("nan", "broken_row"),
}
# Control characters, and characters that change the direction of text.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class Summary(NamedTuple):
    """Distribution of a quantity over the rows of a head.

    Args:
        mean, min, max: over all measured rows.
        p10, p50, p90: 10th, 50th and 90th percentile.
        rows: number of measured rows.

    Example:
        >>> Summary(mean=0.5, p10=0.1, p50=0.4, p90=0.9, min=0.0, max=1.0, rows=64).p90
        0.9
    """

    mean: float
    p10: float
    p50: float
    p90: float
    min: float
    max: float
    rows: int


STATISTICS = Summary._fields[:-1]


@dataclass(frozen=True)
class Record:
    """Statistics of one attention head at one step.

    attnscale/diagnostics/README.md lists all quantities.

    Args:
        step: training step.
        layer: path of the attention module.
        head: index of the head in the layer.
        forward: per-row quantities of the forward pass by name.
        backward: per-row quantities of the backward pass by name.
        scalars: quantities with one number per head.
        mode: "training", or "evaluation" if the layer had no training call at this step.

    Example:
        >>> record = Record(0, "layers.0", 3, scalars={"gain": 0.8})
        >>> record.value("", "gain"), Record.from_dict(record.as_dict()) == record
        (0.8, True)
    """

    step: int
    layer: str
    head: int
    forward: Mapping[str, Summary] = field(default_factory=dict)
    backward: Mapping[str, Summary] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    mode: str = "training"

    def summaries(self) -> Iterator[tuple[str, str, Summary]]:
        """Iterate over phase, name and summary of each per-row quantity."""
        for phase, summaries in (("forward", self.forward), ("backward", self.backward)):
            yield from ((phase, name, summary) for name, summary in summaries.items())

    def value(self, phase: str, name: str, statistic: str = "mean") -> float | None:
        """Return one number of the record.

        Args:
            phase: "forward", "backward", or "" for a scalar.
            name: name of the quantity.
            statistic: field of `Summary`; ignored for scalars.

        Returns:
            The number, or None if it was not recorded.
        """
        if not phase:
            return self.scalars.get(name)
        summary = (self.forward if phase == "forward" else self.backward).get(name)
        return None if summary is None else float(getattr(summary, statistic))

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain dictionaries and numbers for JSON. NaN and infinity become strings."""
        phases: dict[str, Any] = {"forward": {}, "backward": {}}
        for phase, name, summary in self.summaries():
            phases[phase][name] = to_json(summary._asdict())
        place = {"step": self.step, "layer": self.layer, "head": self.head, "mode": self.mode}
        return {**place, **phases, "scalars": to_json(self.scalars)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        """Inverse of `as_dict`."""
        phases = {
            phase: {name: Summary(**from_json(summary)) for name, summary in content[phase].items()}
            for phase in ("forward", "backward")
        }
        scalars, mode = from_json(content["scalars"]), content.get("mode", "training")
        return cls(content["step"], content["layer"], content["head"], **phases, scalars=scalars, mode=mode)


@dataclass(frozen=True)
class RunInfo:
    """What a monitor measures and how: the header of a file.

    Args:
        model: class of the model.
        layers: number of measured layers.
        heads: largest number of heads of a layer.
        policy: policies of the layers, separated by semicolons.
        every: number of steps between two measurements.
        rows: number of sampled rows per attention call. None means all rows.
        attnscale, torch: versions.
        started: date and time of the first report, ISO 8601 with time zone.
        limits: the thresholds of events; empty without events, None in files of older versions.
        format: version of the file format.

    Example:
        >>> run = RunInfo("GPT", 48, 32, "log", 50, 64, "0.1.0", "2.13.0", "2026-01-31T12:00:00+00:00")
        >>> RunInfo.from_dict(run.as_dict()) == run
        True
    """

    model: str
    layers: int
    heads: int
    policy: str
    every: int
    rows: int | None
    attnscale: str
    torch: str
    started: str
    limits: Mapping[str, float | None] | None = None
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {**asdict(self), "limits": None if self.limits is None else to_json(self.limits)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunInfo:
        """Inverse of `as_dict`. Unknown fields are ignored. Raises TypeError if a field is missing."""
        limits = content.get("limits")
        return cls(**{**_known(cls, content), "limits": None if limits is None else from_json(limits)})


class Progress(NamedTuple):
    """State of the training at a report.

    Args:
        loss: training loss, if it was passed to `Monitor.step`.
        lr: learning rate, if it was passed to `Monitor.step`.
        dropped: number of reports so far that were dropped because the sink was too slow.

    Example:
        >>> Progress(loss=2.5).dropped
        0
    """

    loss: float | None = None
    lr: float | None = None
    dropped: int = 0


@dataclass(frozen=True)
class Event:
    """A problem of a run: one cause, from the first report that shows it to the last.

    A monitor sends an event when it begins, when it spreads to more heads or becomes critical ("lasting"), and when it
    is over. Messages about the same problem have the same `number`.

    Args:
        number: identifies the event within a run, from 0.
        cause: a key of `attnscale.diagnostics.events.CAUSES`.
        status: "begun", "lasting" or "over".
        severity: "warning" or "critical".
        start: first step with the problem.
        step: step of this message.
        places: layers with their heads. No heads means the whole layer, no layers the whole model.
        message: the problem in one sentence: what, where, since when.
        advice: one sentence of what to try.
        quantity: the recorded quantity that shows the problem, if any.
        value: its value at the worst head.
        usual: its value before the problem, or the limit that was crossed.

    Example:
        >>> places = (("layers.2", (3,)),)
        >>> event = Event(0, "logit_jump", "begun", "warning", 150, 150, places, "logits jumped", "lower the rate")
        >>> Event.from_dict(event.as_dict()) == event
        True
    """

    number: int
    cause: str
    status: str
    severity: str
    start: int
    step: int
    places: tuple[tuple[str, tuple[int, ...]], ...]
    message: str
    advice: str
    quantity: str = ""
    value: float | None = None
    usual: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. NaN and infinity become strings."""
        return to_json(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Event:
        """Inverse of `as_dict`. Unknown fields are ignored. Raises TypeError, KeyError or ValueError if invalid."""
        places = tuple((str(layer), tuple(map(int, heads))) for layer, heads in content["places"])
        return cls(**from_json(_known(cls, content), ("value", "usual")) | {"places": places})

    @classmethod
    def from_alert(cls, content: Mapping[str, Any]) -> Event:
        """Convert an alert of an old file, one head that crossed a limit. Alerts of a kind have the same number."""
        kind = content["kind"]
        cause, quantity = OLD_KINDS.get(kind, (kind, ""))
        numbers = from_json(content, ("value", "limit"))
        return cls(
            [*OLD_KINDS, kind].index(kind),
            cause,
            "begun",
            "critical" if kind == "broken" else "warning",
            content["step"],
            content["step"],
            ((content["layer"], (content["head"],)),),
            content["message"],
            "",
            quantity,
            numbers["value"],
            numbers["limit"],
        )

    @property
    def where(self) -> str:
        """The places as text, shortened if there are many.

        >>> places = (("layers.2", (3, 5)), ("layers.4", ()))
        >>> Event(0, "logit_jump", "begun", "warning", 150, 150, places, "", "").where
        'layers.2 heads 3, 5; layers.4'
        >>> places = tuple((f"layers.{index}", (0, 1)) for index in range(6))
        >>> Event(0, "logit_jump", "begun", "warning", 150, 150, places, "", "").where
        '12 heads in 6 layers, layers.0 to layers.5'
        """
        if len(self.places) > SHOWN_LAYERS:
            number = sum(len(heads) for _, heads in self.places)
            what = f"{number} heads in {len(self.places)} layers" if number else f"{len(self.places)} layers"
            return f"{what}, {self.places[0][0]} to {self.places[-1][0]}"
        parts = []
        for layer, heads in self.places:
            more = f" and {len(heads) - SHOWN_HEADS} more" if len(heads) > SHOWN_HEADS else ""
            numbers = ", ".join(map(str, heads[:SHOWN_HEADS])) + more
            parts.append(f"{layer} head{'s' if len(heads) > 1 else ''} {numbers}" if heads else layer)
        return "; ".join(parts) or "the whole model"


def layers_of(records: Iterable[Record]) -> list[str]:
    """Return the layers in order of first appearance."""
    return list(dict.fromkeys(record.layer for record in records))


def clean(text: str) -> str:
    """Escape control characters, so that text from a file or a model cannot control a terminal.

    >>> clean("layers.0\\x1b[2J")
    'layers.0\\\\x1b[2J'
    """
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _known(kind: type[Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: content[field.name] for field in fields(kind) if field.name in content}


def to_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by strings."""
    return {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in content.items()}


def from_json(content: Mapping[str, Any], names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Inverse of `to_json` for the fields `names`; None means all fields."""
    return {
        name: float(x) if isinstance(x, str) and (names is None or name in names) else x for name, x in content.items()
    }
