"""Tables and figures of the prediction experiment: every prediction against what was measured, hit or miss.

Λ is that of the head with the largest weight on the answers, without the first keys, with minimum rank 8. The length of
failure is where accuracy under β = 1 falls below 75 % of that of hard argmax; the mildest sufficient law is the first
of `ORDER` with 95 % of the accuracy of the best. r at these two points was read off seeds 10 to 14 (`swapped_in.csv`)
before, and is not fitted here. The baseline measures nothing: it is the mean of the other seeds of the same recipe and
growth, geometric for Λ and lengths, the most frequent for laws. Lengths of failure beyond the longest measured length
count as that length.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnscale._util.files import write_table, write_whole
from attnscale.lab.calibration.heads import RANK
from attnscale.lab.calibration.measuring import Place, collect, scale_name
from attnscale.lab.results import interval
from attnscale.policies import build_policy
from attnscale.report.chart import Chart, Point, Series, logarithmic, style
from attnscale.report.drawing import png
from scripts.calibration.prediction import (
    GROWTHS,
    LAWS,
    RECIPES,
    SHORTER,
    TARGET,
    TRAINED,
    Case,
    cases,
    is_done,
    read_calibration,
    read_observed,
)

FAILED, ENOUGH = 0.75, 0.95
R_FAILED, R_ENOUGH = 1.23, 1.75  # medians over seeds 10 to 14; ranges 1.22 to 1.27 and 1.54 to 1.88
ORDER = ("constant", *LAWS)
RESAMPLES = 2000

COLUMNS = (
    *("recipe", "growth", "seed", "quantity", "observed", "power", "log", "low", "high", "baseline"),
    *("error_power", "error_log", "error_baseline", "in_bracket"),
)
SUMMARY = (
    *("recipe", "growth", "quantity", "seeds", "error_power", "error_log", "error_baseline"),
    *("worst_power", "worst_log", "worst_baseline", "in_bracket"),
)
COMPARED = (
    *("recipe", "policy", "against", "seeds", "accuracy", "accuracy_difference", "accuracy_low", "accuracy_high"),
    *("bits", "cost", "cost_ratio", "cost_ratio_low", "cost_ratio_high"),
)

POINTS = ("recipe", "growth", "seed", "policy", "length", "criticality", "share_of_argmax")


class Prediction(NamedTuple):
    """One quantity of one case; laws are given by their place in `ORDER`."""

    case: Case
    quantity: str
    observed: float
    power: float
    log: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_law(self) -> bool:
        return self.quantity == "mildest law"


def write(output: Path) -> list[Path]:
    """Write the tables and figures of all finished cases."""
    done = [case for case in cases() if is_done(case)]
    found = [prediction for case in done for prediction in predictions(case)]
    rows = [_row(one, found) for one in found]
    compared = list(compare([case for case in done if case.growth == GROWTHS[0]]))
    output.mkdir(parents=True, exist_ok=True)
    names = ("prediction.csv", "errors.csv", "laws.csv", "criticality.csv", "prediction.png")
    paths = [output / f"calibration_{name}" for name in names]
    write_table(paths[0], COLUMNS, rows)
    write_table(paths[1], SUMMARY, list(_summary(rows)))
    write_table(paths[2], COMPARED, compared)
    write_table(paths[3], POINTS, [row for case in done for row in criticality_points(case)])
    write_whole(paths[4], png(*charts(found)))
    return paths


def predictions(case: Case) -> Iterable[Prediction]:
    """Yield what calibration predicted for a case, with what was measured."""
    about, observed = read_calibration(case), read_observed(case)
    if not about["retrieving"]:
        return
    head = max(about["retrieving"], key=lambda one: one["weight"])
    curve = {int(point["length"]): point for point in head["curve"]}
    own = next(
        row for row in _rows(case, "heads.csv") if (row["layer"], int(row["head"])) == (head["layer"], head["head"])
    )
    for length, cells in observed.rows.items():
        measured = collect(cells)[Place(head["layer"], head["head"])].scales[scale_name(RANK, False)][length]
        point = curve[length]
        scale = torch.cat(measured).median().item()
        yield Prediction(case, f"Λ at {length}", scale, point["power"], point["log"], point["low"], point["high"])
    accuracy = {(row["policy"], int(row["length"])): float(row["value"]) for row in _accuracy(case)}
    shares = [observed.accuracy["constant"][n] / observed.accuracy["argmax"][n] for n in SHORTER]
    shares.append(accuracy["constant", TARGET] / accuracy["argmax", TARGET])
    start = {form: curve[TRAINED][form] for form in ("power", "log")}
    where = 1 / R_FAILED
    power = TRAINED * (where / start["power"]) ** (1 / float(own["power"]))
    log = math.exp(math.log(TRAINED) * (where / start["log"]) ** (1 / float(own["log"])))
    lengths = (min(TARGET, length) for length in (crossing((*SHORTER, TARGET), shares, FAILED), power, log))
    yield Prediction(case, "length of failure", *lengths)
    best = max(accuracy[law, TARGET] for law in ORDER)
    mildest = next(place for place, law in enumerate(ORDER) if accuracy[law, TARGET] >= ENOUGH * best)
    yield Prediction(case, "mildest law", mildest, *(_mildest(curve[TARGET][form]) for form in ("power", "log")))


def criticality_points(case: Case) -> Iterable[dict[str, Any]]:
    """Yield r and accuracy relative to argmax as in the table of the evaluation: Λ with the first keys."""
    about, observed = read_calibration(case), read_observed(case)
    if not about["retrieving"]:
        return
    head = max(about["retrieving"], key=lambda one: one["weight"])
    accuracy = {(row["policy"], int(row["length"])): float(row["value"]) for row in _accuracy(case)}
    accuracy |= {(policy, n): value for policy, known in observed.accuracy.items() for n, value in known.items()}
    for length, cells in observed.rows.items():
        scales = collect(cells)[Place(head["layer"], head["head"])].scales[scale_name(RANK, True)][length]
        for law in ORDER:
            if (law, length) in accuracy:
                yield {
                    "recipe": case.recipe,
                    "growth": case.growth,
                    "seed": case.seed,
                    "policy": law,
                    "length": length,
                    "criticality": _beta(law, length) / torch.cat(scales).median().item(),
                    "share_of_argmax": accuracy[law, length] / accuracy["argmax", length],
                }


def _mildest(scale: float) -> int:
    """Return the place of the first law with enough criticality at the target, or of the last."""
    enough = [place for place, law in enumerate(ORDER) if _beta(law, TARGET) / scale >= R_ENOUGH]
    return min(enough, default=len(ORDER) - 1)


def _beta(law: str, length: int) -> float:
    anchor = {} if law == "constant" else {"reference_length": TRAINED, "floor": True}
    return float(build_policy(law, **anchor)(length))


def crossing(lengths: Sequence[int], shares: Sequence[float], below: float) -> float:
    """Return the length at which a share falls below a value, interpolated in ln n; ∞ if it does not.

    >>> crossing((100, 400), (1.0, 0.5), 0.75)
    200.0
    """
    points = [(lengths[0] / 2, 1.0), *zip(lengths, shares, strict=True)] if shares[0] < below else None
    for (left, before), (right, after) in itertools.pairwise(points or list(zip(lengths, shares, strict=True))):
        if before >= below > after:
            return float(left * (right / left) ** ((before - below) / (before - after)))
    return math.inf


def _row(one: Prediction, every: Sequence[Prediction]) -> dict[str, Any]:
    others = [
        x.observed
        for x in every
        if x.quantity == one.quantity and x.case.seed != one.case.seed and x.case[::2] == one.case[::2]
    ]
    row: dict[str, Any] = {"recipe": one.case.recipe, "growth": one.case.growth, "seed": one.case.seed}
    row |= {"quantity": one.quantity}
    if one.is_law:
        usual = Counter(others).most_common(1)[0][0] if others else math.nan
        for name, value in (("observed", one.observed), ("power", one.power), ("log", one.log), ("baseline", usual)):
            row[name] = "" if math.isnan(value) else ORDER[int(value)]
        for name, value in (("power", one.power), ("log", one.log), ("baseline", usual)):
            row[f"error_{name}"] = abs(value - one.observed)
        return row
    baseline = math.exp(statistics.fmean(map(math.log, others))) if others else math.nan
    row |= {"observed": one.observed, "power": one.power, "log": one.log, "baseline": baseline}
    for name, value in (("power", one.power), ("log", one.log), ("baseline", baseline)):
        row[f"error_{name}"] = max(value / one.observed, one.observed / value)
    if not math.isnan(one.low):
        row |= {"low": one.low, "high": one.high, "in_bracket": int(one.low <= one.observed <= one.high)}
    return row


def _summary(rows: Sequence[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the median and the worst error over the seeds; for laws, the number of hits."""
    kinds = dict.fromkeys((row["recipe"], row["growth"], row["quantity"]) for row in rows)
    for recipe, growth, quantity in (*kinds, *(("all", growth, quantity) for growth, quantity in _pairs(kinds))):
        some = [
            row
            for row in rows
            if row["quantity"] == quantity and row["growth"] == growth and recipe in ("all", row["recipe"])
        ]
        found: dict[str, Any] = {"recipe": recipe, "growth": growth, "quantity": quantity, "seeds": len(some)}
        for form in ("power", "log", "baseline"):
            errors = [row[f"error_{form}"] for row in some]
            is_law = quantity == "mildest law"
            found[f"error_{form}"] = sum(error == 0 for error in errors) if is_law else statistics.median(errors)
            found[f"worst_{form}"] = max(errors)
        known = [row["in_bracket"] for row in some if "in_bracket" in row]
        yield found | ({"in_bracket": sum(known)} if known else {})


def _pairs(kinds: Iterable[tuple[str, float, str]]) -> Iterable[tuple[float, str]]:
    return dict.fromkeys((growth, quantity) for _, growth, quantity in kinds)


def compare(done: Sequence[Case]) -> Iterable[dict[str, Any]]:
    """Yield every law and plan against the single law with the best mean accuracy, paired over the seeds."""
    for recipe in (*RECIPES, "all"):
        some = [case for case in done if recipe in ("all", case.recipe)]
        if len(some) < 2:
            continue
        accuracy, cost, bits = dict[str, list[float]](), dict[str, list[float]](), dict[str, list[float]]()
        for case in some:
            rows = [row for row in _rows(case, "held_out.csv") if row["task"] == "needles" and not row["bin"]]
            for row in rows:
                if row["metric"] == "accuracy":
                    accuracy.setdefault(row["policy"], []).append(float(row["value"]))
                if row["metric"] == "bits_per_byte":
                    bits.setdefault(row["policy"], []).append(float(row["value"]))
                    cost.setdefault(row["policy"], []).append(float(row["difference"] or 0.0))
        best = max(LAWS, key=lambda law: statistics.fmean(accuracy[law]))
        for policy, values in accuracy.items():
            if len(values) < len(some):
                continue  # the fit wrote no plan for some seed
            index = torch.randint(len(some), (RESAMPLES, len(some)), generator=torch.Generator().manual_seed(0))
            own, of_best = (torch.tensor(x, dtype=torch.float64) for x in (values, accuracy[best]))
            paid, of_best_paid = (torch.tensor(cost[x], dtype=torch.float64) for x in (policy, best))
            ends = interval((own - of_best)[index].mean(1))
            ratio_ends = interval(paid[index].mean(1) / of_best_paid[index].mean(1))
            yield {
                "recipe": recipe,
                "policy": policy,
                "against": best,
                "seeds": len(some),
                "accuracy": own.mean().item(),
                "accuracy_difference": (own - of_best).mean().item(),
                "accuracy_low": ends[0],
                "accuracy_high": ends[1],
                "bits": statistics.fmean(bits[policy]),
                "cost": paid.mean().item(),
                "cost_ratio": (paid.mean() / of_best_paid.mean()).item(),
                "cost_ratio_low": ratio_ends[0],
                "cost_ratio_high": ratio_ends[1],
            }


def charts(found: Sequence[Prediction]) -> list[Chart]:
    """Return predicted against observed Λ at the target and lengths of failure, by the power of n."""
    drawn = []
    for quantity, label in ((f"Λ at {TARGET}", "Λ at 128×"), ("length of failure", "length of failure")):
        series = []
        for place, (recipe, growth) in enumerate(itertools.product(RECIPES, GROWTHS)):
            points = [
                Point(one.observed, one.power)
                for one in found
                if (one.quantity, one.case.recipe, one.case.growth) == (quantity, recipe, growth)
                and math.isfinite(one.observed * one.power)
            ]
            name = f"{recipe.replace('_', ' ')}, {'n' if growth == 1 else '√n'}"
            if points:  # matplotlib cannot lay out an empty line
                series.append(Series(name, style(place), points, joined=False))
        values = [value for one in series for point in one.points for value in (point.x, point.y)]
        axis = logarithmic(f"observed {label}", values)
        same = Series("equal", style(4), [Point(x, x) for x in (axis.low, axis.high)])
        chart = Chart(label, [*series, same], axis, axis._replace(label="predicted from 1× to 4×"))
        drawn.append(chart)
    return drawn


def _accuracy(case: Case) -> list[dict[str, str]]:
    return [row for row in _rows(case, "held_out.csv") if row["metric"] == "accuracy" and not row["bin"]]


def _rows(case: Case, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((case.folder / name).read_text(encoding="utf-8").splitlines()))
