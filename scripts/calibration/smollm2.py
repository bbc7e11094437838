"""Table and figure of the calibrations of SmolLM2-135M, from runs/calibrate_smollm2_*.

make demo-llm    # runs the calibrations and this

The figure shows r = 1/Λ of every head under β = 1, with and without the first keys, and the change of bits per byte
under each policy by position.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnscale._util.files import write_table, write_whole
from attnscale.lab.calibration.heads import COLUMNS as HEAD_COLUMNS
from attnscale.lab.results import RESULT_COLUMNS
from attnscale.policies.record import split_number
from attnscale.report.chart import Chart, Mark, Point, Series, lengths_axis, linear, logarithmic, style
from attnscale.report.drawing import png

RUNS = {2: Path("runs/calibrate_smollm2_2x"), 4: Path("runs/calibrate_smollm2_4x")}
NAME = "calibrated_smollm2"


def write(output: Path) -> list[Path]:
    """Write heads, held-out results, verdicts and figure of the finished runs."""
    done = {factor: folder for factor, folder in RUNS.items() if (folder / "calibration.json").is_file()}
    if not done:
        raise SystemExit("no finished calibration of SmolLM2: run `make demo-llm`")
    paths = [output / f"{NAME}{end}" for end in ("_heads.csv", ".csv", "_verdict.json", ".png")]
    output.mkdir(parents=True, exist_ok=True)
    write_table(paths[0], ("factor", *HEAD_COLUMNS), list(_tagged(done, "heads.csv")))
    write_table(paths[1], ("factor", *RESULT_COLUMNS), list(_tagged(done, "held_out.csv")))
    about = {factor: json.loads((folder / "calibration.json").read_text("utf-8")) for factor, folder in done.items()}
    kept = ("trained_length", "criterion", "retrieving", "validation", "plans", "policy", "helped", "verdict")
    found = {f"{factor}x": {key: one[key] for key in kept} for factor, one in about.items()}
    write_whole(paths[2], json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    first = next(iter(done.values()))
    write_whole(
        paths[3], png(criticality_chart(_rows(first, "heads.csv")), position_chart(_rows(first, "held_out.csv")))
    )
    return paths


def criticality_chart(heads: list[dict[str, str]]) -> Chart:
    """Return r of every head by layer, with and without the first keys."""
    series = []
    for place, (column, label) in enumerate(
        (("criticality_with_first", "with the first keys"), ("criticality", "without them"))
    ):
        points = [
            Point(float(split_number(row["layer"])[1] or 0) + 0.3 * place, float(row[column]))
            for row in heads
            if row[column] and 0 < float(row[column]) < float("inf")
        ]
        series.append(Series(label, style(place), points, joined=False))
    values = [point.y for one in series for point in one.points]
    layers = [point.x for one in series for point in one.points]
    axes = linear("layer", layers), logarithmic("r = 1/Λ under β = 1", values)
    return Chart("Criticality of every head", series, *axes, [Mark("r = 1", y=1.0)])


def position_chart(rows: list[dict[str, str]]) -> Chart:
    """Return the change of bits per byte against β = 1, by the end of each bin."""
    bins = [row for row in rows if row["bin"] and row["metric"] == "bits_per_byte" and row["difference"]]
    bins = [row for row in bins if row["task"] == bins[0]["task"]]
    series = []
    for place, policy in enumerate(dict.fromkeys(row["policy"] for row in bins)):
        points = []
        for row in (row for row in bins if row["policy"] == policy):
            value, low, high = (float(row[name]) for name in ("difference", "difference_low", "difference_high"))
            points.append(Point(float(row["bin"].split("-")[1]), value, low, high))
        series.append(Series(policy, style(place + 1), points))
    values = [x for one in series for point in one.points for x in (point.low, point.high) if x is not None]
    axes = lengths_axis("position", [p.x for one in series for p in one.points]), linear("bits per byte", values)
    return Chart("Change of bits per byte", series, *axes, [Mark("β = 1", y=0.0)])


def _tagged(done: dict[int, Path], name: str) -> Iterator[dict[str, Any]]:
    for factor, folder in done.items():
        for row in _rows(folder, name):
            yield {"factor": factor, **row}


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text(encoding="utf-8").splitlines()))
