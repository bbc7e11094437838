"""What a monitor reports: one record per layer, head and step, each number with its spread over rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """A quantity over the rows of a head: mean, 10, 50 and 90 per cent, extremes, and how many rows there were."""

    mean: float
    p10: float
    p50: float
    p90: float
    min: float
    max: float
    rows: int


@dataclass(frozen=True)
class Record:
    """One head of one layer at one step.

    `forward` and `backward` map the name of a per-row quantity to its summary; `scalars` holds what a head has one of:
    angle_ratio, the norms query_gradient, key_gradient and value_gradient, gain = ‖(dQ, dK, dV)‖/‖dO‖, mismatch, by how
    much backward's statistics of the same rows differ from forward's, and skipped_calls where some could not be
    listened to. `mode` is "training", or "evaluation" where no call of the layer belonged to training.
    """

    step: int
    layer: str
    head: int
    forward: Mapping[str, Summary] = field(default_factory=dict)
    backward: Mapping[str, Summary] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    mode: str = "training"

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and numbers; what is not finite becomes a string, which JSON can hold."""
        phases = {
            phase: {name: _plain(summary._asdict()) for name, summary in summaries.items()}
            for phase, summaries in (("forward", self.forward), ("backward", self.backward))
        }
        place = {"step": self.step, "layer": self.layer, "head": self.head, "mode": self.mode}
        return {**place, **phases, "scalars": _plain(self.scalars)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        """The inverse of `as_dict`."""
        phases = {
            phase: {name: Summary(**_numbers(summary)) for name, summary in content[phase].items()}
            for phase in ("forward", "backward")
        }
        scalars, mode = _numbers(content["scalars"]), content.get("mode", "training")
        return cls(content["step"], content["layer"], content["head"], **phases, scalars=scalars, mode=mode)


@dataclass(frozen=True)
class Alert:
    """Something a threshold was set for has happened."""

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
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Alert:
        """The way back from `as_dict`."""
        return cls(**_numbers(content, ("value", "limit")))


def layers_of(records: Iterable[Record]) -> list[str]:
    """The layers in the order they first appear."""
    return list(dict.fromkeys(record.layer for record in records))


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in content.items()}


def _numbers(content: Mapping[str, Any], names: tuple[str, ...] | None = None) -> dict[str, Any]:
    return {
        name: float(x) if isinstance(x, str) and (names is None or name in names) else x for name, x in content.items()
    }
