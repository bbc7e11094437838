"""scales.csv and calibration.json: what a calibration found, for the page and for programs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnscale import __version__
from attnscale._util.files import write_whole
from attnscale.lab.calibration.fit import Round
from attnscale.lab.calibration.growth import FORMS
from attnscale.lab.calibration.heads import RETRIEVES, Head
from attnscale.lab.calibration.held_out import Verdict
from attnscale.lab.calibration.options import Calibration
from attnscale.lab.inputs import ModelFolder

SCALE_COLUMNS = ("layer", "head", "rows_of", "retrieves", "length", "accumulation", "low", "high")


def scale_rows(heads: list[Head]) -> Iterator[dict[str, Any]]:
    """Yield the rows of scales.csv: Λ of every head at every length."""
    for head in heads:
        growth = head.growth
        if growth is None:
            continue
        for length, value, low, high in zip(growth.lengths, growth.medians, growth.lows, growth.highs, strict=True):
            row = {"layer": head.place.layer, "head": head.place.head, "rows_of": head.rows_of}
            row |= {"retrieves": int(head.retrieves), "length": length}
            yield row | {"accumulation": value, "low": low, "high": high}


def _curve(head: Head, trained: int, target: int) -> Iterator[dict[str, float]]:
    """Yield both forms of Λ and their bracket at doublings from the trained length to the target."""
    if head.growth is None:
        return
    lengths = [trained]
    while lengths[-1] * 2 < target:
        lengths.append(lengths[-1] * 2)
    for length in (*lengths, target):
        low, high = head.growth.predict(length)
        power, log = (head.growth.forms[name].at(length)[0].item() for name in FORMS)
        yield {"length": length, "power": power, "log": log, "low": low, "high": high}


def write_description(
    output: Path,
    options: Calibration,
    folder: ModelFolder,
    trained: int,
    heads: list[Head],
    rounds: list[Round],
    plans: dict[str, dict[str, Any]],
    chosen: str | None,
    verdicts: dict[str, Verdict],
) -> None:
    """Write calibration.json."""
    retrieving = [head for head in heads if head.retrieves]
    content = {
        "attnscale": __version__,
        "options": dataclasses.asdict(options) | dataclasses.asdict(options.style),
        "model": {"name": folder.name, "fingerprint": folder.fingerprint},
        "trained_length": trained,
        "criterion": f"a head retrieves if its mean weight on the answer's needle is at least {RETRIEVES}",
        "retrieving": [
            {
                "layer": head.place.layer,
                "head": head.place.head,
                "weight": head.weight,
                "criticality": head.criticality(),
                "lost_between": [None if math.isinf(end) else end for end in head.lost_between()],
                "exponent": head.exponent(),
                "decided": None if head.growth is None else head.growth.decided,
                "curve": list(_curve(head, trained, options.to)),
            }
            for head in retrieving
        ],
        "validation": [one.validation for one in rounds],
        "plans": plans,
        "policy": chosen,
        "helped": chosen is not None and verdicts[chosen].outcome == "helped",
        "verdict": {name: {"outcome": one.outcome, "sentences": one.sentences} for name, one in verdicts.items()},
    }
    write_whole(output / "calibration.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
