"""Clock, power and temperature of a card, as far as torch can read them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch


class Telemetry(NamedTuple):
    """Of one moment; None where it cannot be read."""

    mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None

    def known(self) -> dict[str, float]:
        """What could be read, by name.

        >>> Telemetry(mhz=1980.0).known()
        {'mhz': 1980.0}
        """
        return {name: value for name, value in self._asdict().items() if value is not None}


def read_telemetry(device: torch.device) -> Telemetry:
    """Over the last second or less. torch asks NVIDIA's or AMD's library, by a package that may not be installed."""
    power = _read(torch.cuda.power_draw, device)
    unit = 1 if torch.version.hip else 1000  # torch passes on what the libraries give: AMD's watts, NVIDIA's milliwatts
    return Telemetry(
        _read(torch.cuda.clock_rate, device),
        None if power is None else power / unit,
        _read(torch.cuda.temperature, device),
    )


def _read(quantity: Callable[[torch.device], int], device: torch.device) -> float | None:
    # Missing packages and drivers, or cards that do not tell, raise whatever the vendor's library raises; on ROCm torch
    # gives 0 for what is not known.
    with contextlib.suppress(Exception):
        return float(quantity(device)) or None
    return None
