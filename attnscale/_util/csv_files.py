"""Tables as CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnscale._util.files import write_whole


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, whole or not at all: floats with six digits, nothing where there is no number.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "table.csv")
    >>> write_table(target, ["n", "value"], [{"n": 2, "value": 1 / 3}, {"n": 4, "value": math.nan}])
    >>> target.read_text().split()
    ['n,value', '2,0.333333', '4,']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_written(row.get(column, "")) for column in columns] for row in rows)
    write_whole(path, text.getvalue())


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value
