"""Tidy table of all measurements: one row per number."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.files import write_whole


class Quartiles(NamedTuple):
    """Median and quartiles of a measurement."""

    median: float
    low: float
    high: float


def quartiles(values: list[float]) -> Quartiles:
    """Return median and quartiles within the measured range; extrapolated quartiles of times could be negative.

    >>> quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    Quartiles(median=3.0, low=2.0, high=4.0)
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(median, low, high)


@dataclass(frozen=True)
class Row:
    """A value `y` of a `provider` at size `x`; `low` and `high` are the quartiles of a median."""

    kernel: str
    provider: str
    mode: str
    metric: str
    x: int
    y: float
    low: float
    high: float
    config: str
    device: str
    version: str


def write_rows(path: str | Path, rows: Iterable[Any], kind: type[Any] = Row) -> None:
    """Write rows of one dataclass as CSV, atomically."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(kind)])
    writer.writerows([f"{v:.4f}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())
