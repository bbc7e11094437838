"""Thresholds and alerts of a monitor, and warnings about measurements that failed."""

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

FEW_KEYS = 8.0  # with this many visible keys or fewer, near-uniform weights are common by chance


class AlertKind(NamedTuple):
    """Definition of a kind of alert. The limit is a field of `Thresholds`."""

    compared: tuple[str, str, str]  # quantity; statistic over the rows of a head; "above" or "below"
    explanation: str
    message: str  # format string with one placeholder, the value
    where: tuple[tuple[str, float], ...] = ()  # applies only to heads whose medians exceed these values
    after_start: bool = False  # normal in an untrained model

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that show the problem. The first one is compared with the limit."""
        return self.compared[0], *(name for name, _ in self.where)


def _limit(default: float, *about: Any, **more: Any) -> Any:
    return field(default=default, metadata={"kind": AlertKind(*about, **more)})


@dataclass(frozen=True)
class Thresholds:
    """Alert limits per head. None disables an alert.

    `ALERTS` lists the quantity that each limit is compared with.

    Args:
        diffuse: upper limit on entropy / ln n. Applies if half of the rows see more than 8 keys.
        collapsed: upper limit on the median of the largest weight.
        noise: lower limit on the prominence of the best score, for heads in which one key has most of the weight. The
            prominence uses only the mean and standard deviation of the scores. A head that copies repeated tokens
            therefore looks like noise as soon as more than 1/(1 + 2·ln n) of the keys match its query. Disable the
            alert for such models.
        exploding: upper limit on the largest logit of the sampled rows. `Monitor(rows=None)` checks all rows.
        vanishing: lower limit on the gradient gain of the attention, ‖(dQ, dK, dV)‖/‖dO‖.
        mismatch: upper limit on the difference between the forward and backward statistics of a row.
        broken: whether NaN or infinity in the output raises an alert.
        after_step: first step for the alerts that are normal in an untrained model (diffuse, noise, vanishing).

    Raises:
        ArgumentError: a limit is negative or NaN.
        ArgumentTypeError: a limit is not a number, or `broken` is not a bool.

    Example:
        >>> limits = Thresholds(exploding=50.0, noise=None)
        >>> limits.exploding, limits.noise, limits.collapsed
        (50.0, None, 0.99)
    """

    diffuse: float | None = _limit(
        0.98,
        ("relative_entropy", "mean", "above"),
        "attention is spread over all keys",
        "entropy is {:.3f} of ln n: the weights are nearly uniform",
        where=(("visible", FEW_KEYS),),
        after_start=True,
    )
    collapsed: float | None = _limit(
        0.99,
        ("w_max", "p50", "above"),
        "one key has all the weight",
        "the median of the largest weight is {:.3f}",
        where=(("visible", 1.0),),
    )
    noise: float | None = _limit(
        1.0,
        ("prominence", "p50", "below"),
        "most of the weight is on a score no higher than noise",
        "one key has most of the weight, but its score is only {:.2f} of the maximum expected from noise",
        where=(("w_max", 0.5), ("visible", 1.0)),
        after_start=True,
    )
    exploding: float | None = _limit(
        100.0,
        ("max_logit", "max", "above"),
        "a logit of a sampled row is too large",
        "a logit has reached {:.1f}",
    )
    vanishing: float | None = _limit(
        1e-4,
        ("gain", "mean", "below"),
        "almost no gradient flows through the attention",
        "the gradient gain is only {:.1e}",
        after_start=True,
    )
    mismatch: float | None = _limit(
        1e-2,
        ("mismatch", "mean", "above"),
        "forward and backward statistics differ",
        "forward and backward statistics of a row differ by {:.1e}",
    )
    broken: bool = _limit(
        True,
        ("broken_row", "mean", "above"),
        "NaN or infinity in the output",
        "the output contains NaN or infinity, first in row {:.0f}",
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
        """Read thresholds from a YAML file. Missing keys keep their defaults.

        Raises:
            ArgumentError: the file does not exist, or contains an unknown key or an invalid value.
        """
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise ArgumentError(f"key {key!r} in {path} is not accepted: expected {', '.join(known)}")
        return cls(**content)


ALERTS: dict[str, AlertKind] = {
    limit.name: limit.metadata["kind"] for limit in fields(Thresholds) if "kind" in limit.metadata
}
# "broken" comes first because NaN also explains the other alerts of a head.
ORDER = sorted(ALERTS, key=lambda kind: kind != "broken")


def find_alerts(records: Sequence[Record], limits: Thresholds) -> list[Alert]:
    """Return the alerts of all heads that cross a limit."""
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
        if limit is True:  # the value is a row index, or -1
            if value >= 0:
                yield Alert(kind, *place, math.nan, 0.0, about.message.format(value), int(value))
        elif value > limit if direction == "above" else value < limit:
            yield Alert(kind, *place, value, limit, about.message.format(value))


class Notices(Uncopied):
    """Collects warnings during forward and backward, one per kind, and issues them at the end of the step."""

    def __init__(self) -> None:
        self._known: set[object] = set()
        self._waiting: list[str] = []

    def add(self, kind: object, text: str) -> None:
        """Add a warning unless one of this kind has been added before."""
        if kind not in self._known:
            self._known.add(kind)
            self._waiting.append(text)

    def add_error(self, text: str, error: BaseException) -> None:
        """Add a warning about an exception. Its kind is the exception type and the line that raised it."""
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        self.add((type(error), *places[-1:]), f"{text}: {error!r}")

    def issue(self) -> None:
        """Issue all pending warnings."""
        waiting, self._waiting = self._waiting, []
        for text in waiting:
            warnings.warn(f"attnscale: {text}", MonitorWarning, stacklevel=3)
