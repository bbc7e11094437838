"""Needles and a calibration of the embedded model that takes seconds."""

from __future__ import annotations

from pathlib import Path

from attnscale.lab.calibration import Calibration
from attnscale.lab.calibration.reading import Needles
from attnscale.lab.sequences import BYTES

NEEDLES = Needles(BYTES, at_trained=4, growth=1.0, asked=8)


def small(output: Path, **changes) -> Calibration:
    """A calibration with few and short sequences."""
    arguments = {"lengths": (128, 180, 256), "samples": 4, "windows": 2, "asked": 8, "needles": 4, "tests": 3}
    arguments |= {"fit_sequences": 2, "fit_rounds": 1, "fit_steps": 3, "fit_rows": 64, "chunk": 256, "to": 512}
    return Calibration(**({"model": "embedded", "output": str(output)} | arguments | changes))
