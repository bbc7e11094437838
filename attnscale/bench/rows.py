"""One tidy table for everything measured: a row per number."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A number `y` of a `provider` at size `x`; `low` and `high` are quartiles where it is a median."""

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


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write all rows as CSV, or leave an earlier file as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp: its file would stay unreadable to others after the move.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([field.name for field in fields(Row)])
            writer.writerows([f"{v:.4f}" if isinstance(v, float) else v for v in astuple(row)] for row in rows)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
