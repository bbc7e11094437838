"""Encoding of planes as compressed text: exact if they fit a budget, else quantised between minimum and maximum."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.diagnostics.records.record import STATISTICS
from attnscale.report.run import SHOWN, Key, Run

BUDGET = 17_500_000  # bytes of base64 per page, which keeps the page below 20 MB
SAMPLE = 20_000  # values per plane used to estimate its compressed size
SPECIAL = 3  # levels 0, 1 and 2 encode NaN, −∞ and +∞


class Detail(NamedTuple):
    """The stored statistics and their bytes per value: 4 is exact, 2 and 1 are quantised."""

    statistics: tuple[str, ...]
    centre: int  # bytes of scalars, means, and the statistics that show a problem
    others: int

    def width(self, key: Key) -> int:
        """Return the bytes per value; 0 if it is not stored."""
        if key.statistic in ("mean", "value", SHOWN.get(key.name)):
            return self.centre
        return self.others if key.statistic in self.statistics else 0


# From best to smallest; if none fits, steps are thinned out. One byte is enough for a band.
DETAILS = (
    Detail(STATISTICS, 4, 4),
    Detail(STATISTICS, 2, 2),
    Detail(("mean", "p10", "p90"), 2, 2),
    Detail(("mean", "p10", "p90"), 2, 1),
)


class Encoded(NamedTuple):
    """A plane as base64 of deflated bytes, with decoding parameters.

    Bytes are stored by significance: the lowest bytes of all values first. Levels are differences to the previous step.
    `base` is the index of the plane that was XORed with this one before encoding.
    """

    key: Key
    width: int
    low: float
    high: float
    powers: bool
    base: int | None
    text: str

    def description(self) -> dict[str, Any]:
        """Return all fields except the text, for JSON."""
        content = self.key._asdict() | self._asdict()
        del content["key"], content["text"]
        return content


def encode(run: Run, budget: int = BUDGET) -> tuple[Run, Detail, list[Encoded]]:
    """Encode a run in the best detail that fits the budget; if none fits, in the lowest with fewer steps."""
    # Sizes are estimated from a subset of columns, since compressing all of them takes seconds.
    every = max(1, len(run.steps) * len(run.columns) // SAMPLE)
    some = replace(run, planes={key: plane[:, ::every] for key, plane in run.planes.items()})
    for detail in DETAILS:
        expected = _size(_encode(some, detail)) * every
        if expected <= budget:
            break
    while True:
        if expected > budget and len(run.steps) > 2:
            run = run.thinned(max(2, int(0.97 * len(run.steps) * budget / expected)))
        encoded = _encode(run, detail)
        expected = _size(encoded)
        if expected <= budget or len(run.steps) <= 2:
            return run, detail, encoded


def _size(encoded: list[Encoded]) -> int:
    return sum(len(plane.text) for plane in encoded)


def _encode(run: Run, detail: Detail) -> list[Encoded]:
    found: list[Encoded] = []
    places: dict[Key, int] = {}
    bits: dict[Key, Tensor] = {}
    for key, plane in run.planes.items():
        width = detail.width(key)
        if not width:
            continue
        # Backward values mostly equal forward values: XOR leaves mostly zeros.
        twin = key._replace(phase="forward")
        base = places.get(twin) if key.phase == "backward" else None
        other = run.planes.get(key._replace(phase="backward")) if key.phase == "forward" else None
        scale = _scale(plane, other) if base is None else found[base][2:5]
        own = bits[key] = _bits(plane, width, *scale)
        if base is not None:
            own = own ^ bits[twin]
        places[key] = len(found)
        found.append(Encoded(key, width, *scale, base, pack(own, width)))
    return found


def _scale(plane: Tensor, other: Tensor | None) -> tuple[float, float, bool]:
    """Return minimum and maximum finite value of both planes, and whether levels are logarithmic."""
    both = plane if other is None else torch.cat([plane, other])
    finite = both[torch.isfinite(both)]
    if finite.numel() == 0:
        return 0.0, 0.0, False
    low, high = finite.min().item(), finite.max().item()
    return low, high, low > 0 and high / low > 1000


def _bits(plane: Tensor, width: int, low: float, high: float, powers: bool) -> Tensor:
    """Return a plane as integers of `width` bytes: the bits of its values, or their levels."""
    if width == 4:
        return plane.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    top = 256**width - 1 - SPECIAL
    wide = plane.double()
    share = wide.div(low).log() / math.log(high / low) if powers else (wide - low) / ((high - low) or 1.0)
    levels: Tensor = (share.clamp(0, 1) * top).round().nan_to_num().long() + SPECIAL
    for code, special in enumerate((plane.isnan(), plane == -math.inf, plane == math.inf)):
        levels[special] = code
    return levels


def pack(bits: Tensor, width: int) -> str:
    """Compress integers [steps, columns] of `width` bytes into text."""
    if width < 4:
        bits = torch.cat([bits[:1], bits.diff(dim=0)]) & (256**width - 1)
    parts = [((bits >> (8 * byte)) & 0xFF).to(torch.uint8).flatten() for byte in range(width)]
    raw = bytearray(width * bits.numel())
    torch.frombuffer(raw, dtype=torch.uint8).copy_(torch.cat(parts))  # numpy may not be installed
    # Higher levels take several times as long on a run of many heads, and save a tenth.
    return base64.b64encode(zlib.compress(raw, 1)).decode("ascii")
