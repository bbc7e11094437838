"""Plans for `attnscale.hf.apply`: a law for every layer and head, from exponents or from a table of Λ̂."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnscale._util.ranges import write_range
from attnscale.lab.calibration.heads import Head
from attnscale.lab.calibration.measuring import Place
from attnscale.policies.record import split_number

# Exponents are written with this many decimals; β then changes by less than 0.1 % per factor of e in length.
DECIMALS = 4

# Smaller exponents change β by less than 1 % at 8 times the trained length.
LEAST = 0.005

Exponents = Mapping[Place, float]


def power_plan(exponents: Exponents, trained: int) -> dict[str, Any]:
    """Return a plan in which β = max(1, n/L)^p for the heads with an exponent, and β = 1 for all others.

    >>> power_plan({Place("layers.3.attn", 1): 0.25, Place("layers.3.attn", 2): 0.25}, 128)["layers"]["3"]["heads"]
    {'1-2': {'name': 'power', 'exponent': 0.25, 'reference_length': 128, 'floor': True}}
    """
    layers: dict[str, Any] = {}
    by_layer: dict[int, dict[float, list[int]]] = {}
    for place, exponent in exponents.items():
        rounded = round(exponent, DECIMALS)
        if abs(rounded) >= LEAST:
            own = by_layer.setdefault(split_number(place.layer)[1] or 0, {})
            own.setdefault(rounded, []).append(place.head)
    for layer, groups in sorted(by_layer.items()):
        heads = {
            write_range(numbers): {"name": "power", "exponent": exponent, "reference_length": trained, "floor": True}
            for exponent, numbers in sorted(groups.items(), key=lambda group: min(group[1]))
        }
        layers[str(layer)] = {"default": "constant", "heads": heads}
    return {"default": "constant", "layers": layers}


def calibrated_exponents(heads: Sequence[Head]) -> dict[Place, float]:
    """Return the exponents that keep the criticality of the heads that retrieve: those of their Λ."""
    return {head.place: head.exponent() for head in heads if head.retrieves}


def table_plan(heads: Sequence[Head], trained: int, target: int) -> dict[str, Any]:
    """Return a plan of `gap_adaptive(anchor="trained")` for the layers with a head that retrieves.

    The table of a layer holds the measured medians of Λ from the trained length on, then the fitted power of n at
    doublings up to the target. Heads that do not retrieve have a constant column.
    """
    layers: dict[str, Any] = {}
    for layer in sorted({head.layer for head in heads if head.retrieves}):
        own = sorted((head for head in heads if head.layer == layer), key=lambda head: head.place.head)
        measured = {length for head in own if head.growth is not None for length in head.growth.lengths}
        lengths = sorted({trained, *(length for length in measured if length > trained)})
        while lengths[-1] * 2 < target:
            lengths.append(lengths[-1] * 2)
        lengths = sorted({*lengths, target})
        table = {length: [_scale(head, length) for head in own] for length in lengths}
        law = {"name": "gap_adaptive", "anchor": "trained", "reference_length": trained}
        layers[str(layer)] = law | {"num_heads": len(own), "table": table}
    return {"default": "constant", "layers": layers}


def _scale(head: Head, length: int) -> float:
    """Return Λ̂ of a head at a length, measured or fitted; 1 for a head that does not retrieve."""
    if not head.retrieves or head.growth is None:
        return 1.0
    known = dict(zip(head.growth.lengths, head.growth.medians, strict=True))
    value = known.get(length)
    return float(f"{head.growth.forms['power'].at(length)[0].item() if value is None else value:.5g}")
