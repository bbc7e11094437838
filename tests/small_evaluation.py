"""A small model, a text and an evaluation, for the tests of the lab."""

from __future__ import annotations

import csv
from pathlib import Path

from attnscale.lab.evaluation import Evaluation
from attnscale.lab.sequences import BYTES

STYLE = {name: getattr(BYTES, name) for name in ("needle", "question", "answer", "alphabet")}
STYLE |= {"key_symbols": 2, "value_symbols": 1}


def small(folder: Path, prose: Path, output: Path, **changes) -> Evaluation:
    """Three policies at 64 and 256 tokens, with a trained length of 64."""
    arguments = {"policies": ("constant", "log", "gap_adaptive:r=4"), "lengths": (64, 256), "windows": 3, "samples": 3}
    arguments |= {"needles_every": 16, "asked": 4, "chunk": 100, "text": str(prose), **STYLE}
    return Evaluation(models=(str(folder),), output=str(output), **(arguments | changes))


def rows(output: Path, name: str = "results.csv", **wanted) -> list[dict[str, str]]:
    """The table rows with these fields."""
    with (output / name).open() as file:
        return [row for row in csv.DictReader(file) if all(row[key] == str(value) for key, value in wanted.items())]
