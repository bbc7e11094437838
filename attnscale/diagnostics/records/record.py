"""Records (one per layer, head and step) and alerts, and functions that read them from JSONL files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 1 << 24  # bytes; a longer line is not a record and is not kept in memory


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
            phases[phase][name] = _to_json(summary._asdict())
        place = {"step": self.step, "layer": self.layer, "head": self.head, "mode": self.mode}
        return {**place, **phases, "scalars": _to_json(self.scalars)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        """Inverse of `as_dict`."""
        phases = {
            phase: {name: Summary(**_from_json(summary)) for name, summary in content[phase].items()}
            for phase in ("forward", "backward")
        }
        scalars, mode = _from_json(content["scalars"]), content.get("mode", "training")
        return cls(content["step"], content["layer"], content["head"], **phases, scalars=scalars, mode=mode)


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
        return _to_json(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Event:
        """Inverse of `as_dict`."""
        places = tuple((layer, tuple(heads)) for layer, heads in content["places"])
        return cls(**{**_from_json(content, ("value", "usual")), "places": places})


@dataclass(frozen=True)
class Alert:
    """A head crossed a threshold.

    Args:
        kind: name of the alert, a field of `Thresholds`.
        step: training step.
        layer: path of the attention module.
        head: index of the head in the layer.
        value: value of the quantity; NaN for "broken".
        limit: limit that was crossed.
        message: description of the alert.
        row: first row with NaN or infinity, for "broken".

    Example:
        >>> alert = Alert("exploding", 7, "layers.0", 3, 120.0, 100.0, "a logit has reached 120.0")
        >>> Alert.from_dict(alert.as_dict()) == alert
        True
    """

    kind: str
    step: int
    layer: str
    head: int
    value: float
    limit: float
    message: str
    row: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. NaN and infinity become strings."""
        return _to_json(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Alert:
        """Inverse of `as_dict`."""
        return cls(**_from_json(content, ("value", "limit")))


def layers_of(records: Iterable[Record]) -> list[str]:
    """Return the layers in order of first appearance."""
    return list(dict.fromkeys(record.layer for record in records))


def by_kind(alerts: Iterable[Alert]) -> dict[str, list[Alert]]:
    """Group alerts by kind, in order of first appearance."""
    groups: dict[str, list[Alert]] = {}
    for alert in alerts:
        groups.setdefault(alert.kind, []).append(alert)
    return groups


def _to_json(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in content.items()}


def _from_json(content: Mapping[str, Any], names: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {
        name: float(x) if isinstance(x, str) and (names is None or name in names) else x for name, x in content.items()
    }


def read_jsonl(path: str | Path) -> Iterator[Record | Alert]:
    """Read the records and alerts of a file written by `JsonlSink`.

    Args:
        path: the JSONL file.

    Returns:
        An iterator over records and alerts, in file order. An incomplete last line is skipped.

    Raises:
        OSError: the file cannot be opened.
        ValueError, KeyError, TypeError: a line is neither a record nor an alert.

    Example:
        >>> import tempfile
        >>> from attnscale.diagnostics import JsonlSink
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sink = JsonlSink(f"{folder}/attn.jsonl")
        ...     sink.log([Record(0, "layers.0", 3)], step=0)
        ...     sink.close()
        ...     [item.layer for item in read_jsonl(sink.path)]
        ['layers.0']
    """
    with Path(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse_line(line)


def parse_line(line: bytes) -> Record | Alert:
    """Parse a line. Raises ValueError, KeyError or TypeError if it is neither a record nor an alert."""
    content = json.loads(line)
    return Alert.from_dict(content["alert"]) if content["kind"] == "alert" else Record.from_dict(content)


class Tail:
    """Follows a growing file and returns new lines on each read.

    An incomplete line is read once it is complete. A truncated or replaced file is read from the beginning; `restarts`
    counts these cases. `skipped` counts lines that are not records.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.skipped = 0
        self.restarts = 0
        self._identity: tuple[int, int] | None = None
        self._incomplete = b""  # first byte of an incomplete last line
        self._overlong = False  # the offset is inside a line longer than LONGEST

    @property
    def foreign(self) -> bool:
        """Whether the file contains a line, or the start of a line, that is not a record."""
        return self.skipped > 0 or self._incomplete not in (b"", b"{")

    def new(self) -> Iterator[Record | Alert]:
        """Iterate over the items added since the last call, oldest first. Empty while the file does not exist."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            before, self._identity = self._identity, (status.st_dev, status.st_ino)
            if before not in (None, self._identity) or status.st_size < self.offset:
                self.offset, self.skipped, self._overlong = 0, 0, False
                self.restarts += 1
            self._incomplete = b""
            file.seek(self.offset)
            while line := file.readline(LONGEST):
                complete = line.endswith(b"\n")
                if not complete and len(line) < LONGEST:
                    self._incomplete = line[:1]
                    return
                self.offset += len(line)
                overlong, self._overlong = self._overlong, not complete
                if overlong or not complete:
                    self.skipped += complete
                    continue
                try:
                    yield parse_line(line)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    self.skipped += 1
