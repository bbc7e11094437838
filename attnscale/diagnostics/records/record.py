"""Records, one per layer, head and step, and alerts: what a monitor reports; and reading them from JSONL files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 1 << 24  # bytes of a line; a longer one is no record, and is not kept in memory


class Summary(NamedTuple):
    """A quantity over the rows of a head: mean, 10, 50 and 90 per cent, extremes, and the number of rows."""

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
    """One head of one layer at one step.

    `forward` and `backward` map the name of a per-row quantity to its summary; `scalars` are single numbers of the
    head. `views.display` explains all of them. `mode` is "training", or "evaluation" where no call of the layer
    belonged to training.
    """

    step: int
    layer: str
    head: int
    forward: Mapping[str, Summary] = field(default_factory=dict)
    backward: Mapping[str, Summary] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    mode: str = "training"

    def summaries(self) -> Iterator[tuple[str, str, Summary]]:
        """Phase, name and summary of each per-row quantity."""
        for phase, summaries in (("forward", self.forward), ("backward", self.backward)):
            yield from ((phase, name, summary) for name, summary in summaries.items())

    def value(self, phase: str, name: str, statistic: str = "mean") -> float | None:
        """A statistic of a per-row quantity, or a scalar where the phase is empty; None if it was not recorded."""
        if not phase:
            return self.scalars.get(name)
        summary = (self.forward if phase == "forward" else self.backward).get(name)
        return None if summary is None else float(getattr(summary, statistic))

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers; what is not finite becomes a string, which JSON can hold."""
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
class Alert:
    """A head has crossed a threshold."""

    kind: str
    step: int
    layer: str
    head: int
    value: float
    limit: float
    message: str
    row: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return _to_json(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Alert:
        """Inverse of `as_dict`."""
        return cls(**_from_json(content, ("value", "limit")))


def layers_of(records: Iterable[Record]) -> list[str]:
    """The layers in the order they first appear."""
    return list(dict.fromkeys(record.layer for record in records))


def by_kind(alerts: Iterable[Alert]) -> dict[str, list[Alert]]:
    """The alerts of each kind, in the order the kinds first appear."""
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
    """What a `JsonlSink` has written, in order; an incomplete last line is left out."""
    with Path(path).open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse_line(line)


def parse_line(line: bytes) -> Record | Alert:
    """The content of a line; ValueError, KeyError or TypeError if it is no record or alert."""
    content = json.loads(line)
    return Alert.from_dict(content["alert"]) if content["kind"] == "alert" else Record.from_dict(content)


class Tail:
    """Follows a file: reads what has been added since the last time.

    An incomplete line is left until its end is there. A file that has become shorter, or has been replaced by another,
    is read from its beginning, and `restarts` counts that. `skipped` counts lines that are no records.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.offset = 0
        self.skipped = 0
        self.restarts = 0
        self._identity: tuple[int, int] | None = None
        self._incomplete = b""  # the first byte of a line whose end is not there yet
        self._overlong = False  # the offset is inside a line that is longer than a record can be

    @property
    def foreign(self) -> bool:
        """Whether the file holds something that is no record: lines that were skipped, or the beginning of one."""
        return self.skipped > 0 or self._incomplete not in (b"", b"{")

    def new(self) -> Iterator[Record | Alert]:
        """What has been added since the last call, oldest first; nothing while the file does not exist."""
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
