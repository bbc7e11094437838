"""Records, one per layer, head and step, and alerts: what a monitor reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


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
