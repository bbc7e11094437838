"""What a monitor warns of: heads that cross a limit, and what it could not do itself."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.checks import check_flag, read_int, read_number
from attnscale._util.files import read_yaml
from attnscale._util.handles import Uncopied
from attnscale.diagnostics.records.record import Alert, Record
from attnscale.diagnostics.views.display import QUANTITIES
from attnscale.errors import ArgumentError, MonitorWarning, reject, reject_type

FEW_KEYS = 8.0  # so few, or fewer, are often weighed evenly by chance


class AlertKind(NamedTuple):
    """All about a kind of alert but its limit."""

    compared: tuple[str, str, str]  # quantity; its statistic over the rows of a head; "above" or "below" the limit
    explanation: str
    message: str  # with a place for the value
    where: tuple[tuple[str, float], ...] = ()  # only heads for which the medians of these quantities are larger
    after_start: bool = False  # normal in an untrained model

    @property
    def quantities(self) -> tuple[str, ...]:
        """Those that show it, the first of which has the limit."""
        return self.compared[0], *(name for name, _ in self.where)


def _limit(default: float, *about: Any, **more: Any) -> Any:
    return field(default=default, metadata={"kind": AlertKind(*about, **more)})


@dataclass(frozen=True)
class Thresholds:
    """Limits per head; None switches an alert off. `ALERTS` has what each is compared with.

    diffuse: only where half of the rows see more than a few keys.
    noise: one key has most of the weight, though its score is no higher than the largest of n draws of noise. Only the
        mean and deviation of the scores are used, so many equal keys look like noise: a head that copies repeated
        tokens, once more than 1/(1 + 2·ln n) of the keys match its query. Switch it off there.
    exploding: a row that was not sampled is not seen; with `Monitor(rows=None)` all are.
    vanishing: gain of the gradient through the block, ‖(dQ, dK, dV)‖/‖dO‖.
    broken: a flag, for NaN or infinity in the output.
    after_step: first step for alerts that are normal in an untrained model (diffuse, noise, vanishing).
    """

    diffuse: float | None = _limit(
        0.98,
        ("relative_entropy", "mean", "above"),
        "attention is spread over all keys",
        "entropy is {:.3f} of ln n: no key stands out",
        where=(("visible", FEW_KEYS),),
        after_start=True,
    )
    collapsed: float | None = _limit(
        0.99,
        ("w_max", "p50", "above"),
        "one key has all the weight",
        "half of the rows give {:.3f} to one key",
        where=(("visible", 1.0),),
    )
    noise: float | None = _limit(
        1.0,
        ("prominence", "p50", "below"),
        "most of the weight is on a score no higher than noise",
        "half of the weight is on one key whose score is {:.2f} of what noise would reach",
        where=(("w_max", 0.5), ("visible", 1.0)),
        after_start=True,
    )
    exploding: float | None = _limit(
        100.0,
        ("max_logit", "max", "above"),
        "a logit of a sampled row has become too large",
        "a logit has reached {:.1f}",
    )
    vanishing: float | None = _limit(
        1e-4,
        ("gain", "mean", "below"),
        "hardly any gradient passes the attention",
        "only {:.1e} of the gradient passes",
        after_start=True,
    )
    mismatch: float | None = _limit(
        1e-2,
        ("mismatch", "mean", "above"),
        "backward saw other statistics than forward",
        "backward saw statistics that differ from forward's by {:.1e}",
    )
    broken: bool = _limit(
        True,
        ("broken_row", "mean", "above"),
        "NaN or infinity in the output",
        "the output holds NaN or infinity, first in row {:.0f}",
    )
    after_step: int = 100

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if name == "broken":
                check_flag(name, value)
            elif name == "after_step":
                object.__setattr__(self, name, read_int(name, value, "an int >= 0", least=0))
            elif value is not None:
                if isinstance(value, bool):
                    reject_type(name, value, "a number >= 0 or None")
                limit = read_number(name, value, "a number >= 0 or None")
                if not limit >= 0:
                    reject(name, value, "a number >= 0 or None")
                object.__setattr__(self, name, limit)

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        """From a YAML file; what it does not name keeps its default."""
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise ArgumentError(f"key {key!r} in {path} is not accepted: expected {', '.join(known)}")
        return cls(**content)


ALERTS: dict[str, AlertKind] = {
    limit.name: limit.metadata["kind"] for limit in fields(Thresholds) if "kind" in limit.metadata
}
# A broken head first, since its other numbers follow from that.
ORDER = sorted(ALERTS, key=lambda kind: kind != "broken")


def find_alerts(records: Sequence[Record], limits: Thresholds) -> list[Alert]:
    """The alerts of all heads that cross a limit."""
    return [alert for record in records for alert in _alerts_of(record, limits)]


def _alerts_of(record: Record, limits: Thresholds) -> Iterator[Alert]:
    place = record.step, record.layer, record.head
    for kind in ORDER:
        about, limit = ALERTS[kind], getattr(limits, kind)
        name, statistic, direction = about.compared
        value = record.value(QUANTITIES[name].phase, name, statistic)
        if limit is None or limit is False or value is None:
            continue
        if about.after_start and record.step < limits.after_step:
            continue
        if not all((record.value(QUANTITIES[of].phase, of, "p50") or 0.0) > least for of, least in about.where):
            continue
        if limit is True:  # the number of a row, where there is one
            if value >= 0:
                yield Alert(kind, *place, math.nan, 0.0, about.message.format(value), int(value))
        elif value > limit if direction == "above" else value < limit:
            yield Alert(kind, *place, value, limit, about.message.format(value))


class Notices(Uncopied):
    """Collects warnings during forward and backward, one of each kind, and issues them at the end of a step."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._waiting: list[str] = []

    def add(self, kind: object, text: str) -> None:
        """Add a warning, unless there has been one of its kind."""
        if kind not in self._known:
            self._known.add(kind)
            self._waiting.append(text)

    def add_error(self, text: str, error: BaseException) -> None:
        """Add a warning about an exception; its kind is its type and the line that raised it."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        self.add((type(error), *places[-1:]), f"{text}: {error!r}")

    def issue(self) -> None:
        """Issue the warnings that were added."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warnings.warn(f"attnscale: {text}", MonitorWarning, stacklevel=3)
