"""Λ of every family against its law, the exponents, the transition at β = Λ, and the bounds that hold for each row."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnscale.statistics import StatsRequest, row_statistics
from attnscale.theory import families, gaps
from attnscale.theory.estimates import Estimate, median, slope
from attnscale.theory.experiment import Comparison, Experiment, Progress
from attnscale.theory.families import Family
from attnscale.theory.figures import gaps as figures
from attnscale.theory.gaps import ContactPoint

Rows = list[dict[str, Any]]

CRITICALITIES = [2 ** (step / 2) for step in range(-10, 9)]  # r = β/Λ
REQUEST = StatsRequest(lse=False, max_logit=False)
SHOWN = 6  # rows of each place that are drawn against the bounds
LONG = [2**power for power in range(16, 41, 4)]  # of the exponent of Gaussian rows, which has corrections in ln ln n
BEST = 512  # scores of a long row that are drawn: its contact is nearly always among the first
ROUNDING = 1e-12  # of a bound that holds with equality


class Sizes(NamedTuple):
    """How much is sampled: scores per length and rows at most, rows of the transition, and long Gaussian rows."""

    lengths: list[int]
    scores: int
    rows: int
    transition_rows: int
    long_rows: int


QUICK = Sizes([2**power for power in range(6, 13, 2)], 1 << 20, 2048, 48, 2048)
FULL = Sizes([2**power for power in range(6, 17, 2)], 1 << 24, 4096, 64, 8192)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Measure Λ and its point of contact over n for every family, and the weights of the same rows at β = rΛ."""
    sizes = QUICK if quick else FULL
    laws: Rows = []
    transition: Rows = []
    certified: Rows = []
    fits: dict[str, tuple[Family, list[ContactPoint]]] = {}
    members = _members()
    for step, (label, family) in enumerate(members.items()):
        if progress is not None:
            progress(step, len(members), label)
        ratio = median(gaps.limit_ratio(family, 4000, torch.Generator().manual_seed(1)))
        contacts = []
        for n in sizes.lengths:
            generator = torch.Generator().manual_seed(n)
            contact, scores = _contacts(family, n, sizes, generator)
            contacts.append(contact)
            laws.append(_law(label, family, n, contact, ratio))
            places, points = _transition(label, n, scores, contact)
            transition += places
            certified += points
        fits[label] = family, contacts
    if progress is not None:
        progress(len(members), len(members), "long Gaussian rows")
    exponents, lines = _exponents(fits, sizes.lengths)
    row, line = _long_gaussian(sizes.long_rows)
    exponents.append(row)
    worst = max(abs(row["residual"]) for row in exponents)
    lines = [line, *lines, Comparison("|ξ_Λ − (ξ_α − ξ_Δ + 1)|, largest", "all families", 0.0, worst)]
    return Experiment(
        "gaps",
        [*lines, *_of_laws(laws), *_of_transition(transition)],
        {"laws": laws, "exponents": exponents, "transition": transition, "rows": certified},
        {
            "laws": partial(figures.laws_figure, laws),
            "transition": partial(figures.transition_figure, transition),
            "bounds": partial(figures.bounds_figure, certified),
        },
        (
            partial(figures.draw_laws, rows=laws),
            partial(figures.draw_transition, rows=transition, quantity="separation"),
        ),
    )


def _members() -> dict[str, Family]:
    """What is measured, by the name in tables and legends."""
    members = {
        "gaussian": families.family("gaussian"),
        "correlated": families.family("correlated_gaussian", rho=0.75),
        "simplex": families.family("simplex", rho=0.25),
        "almost simplex": families.family("almost_simplex", rho=0.5, d=1024),
        "three levels": families.family("three_level"),
        "cluster": families.family("cluster"),
    }
    return members | {f"sphere d={d}": families.family("sphere", d=d) for d in (3, 4, 5)}


def _contacts(family: Family, n: int, sizes: Sizes, generator: torch.Generator) -> tuple[ContactPoint, Tensor]:
    """Points of contact of all rows, and the scores of the first of them, for the transition."""
    varied = family.random or isinstance(family, families.AlmostSimplex)
    rows = max(sizes.transition_rows, min(sizes.rows, sizes.scores // n)) if varied else 2
    chunk = max(sizes.transition_rows, (1 << 19) // n)
    parts, kept = [], None
    for start in range(0, rows, chunk):
        scores = family.sample(n, min(chunk, rows - start), generator)
        parts.append(gaps.contact_point(scores))
        kept = scores[: sizes.transition_rows] if kept is None else kept
    joined = ContactPoint(*(torch.cat(column) for column in zip(*parts, strict=True)))
    return joined, torch.empty(0, device="cpu") if kept is None else kept


def _law(label: str, family: Family, n: int, contact: ContactPoint, ratio: Estimate) -> dict[str, Any]:
    found = median(contact.accumulation)
    return {
        "family": label,
        "law": family.formula,
        "n": n,
        "rows": contact.rank.numel(),
        "predicted": family.accumulation(n) * ratio.value,
        "predicted_error": family.accumulation(n) * ratio.error,
        "median": found.value,
        "median_error": found.error,
        "low": contact.accumulation.quantile(0.1).item(),
        "high": contact.accumulation.quantile(0.9).item(),
        "contact_rank": contact.rank.double().median().item(),
        "contact_gap": contact.gap.median().item(),
    }


def _transition(label: str, n: int, scores: Tensor, contact: ContactPoint) -> tuple[Rows, Rows]:
    """Entropy, w_max and w_(1) − w_(2) of rows at β = rΛ, each with its own Λ, and how far the bounds are."""
    rows = len(scores)
    accumulation, rank = contact.accumulation[:rows], contact.rank[:rows]
    best = scores.topk(2, dim=-1).values
    places, points = [], []
    for r in CRITICALITIES:
        beta = r * accumulation
        stats = row_statistics(scores, beta, request=REQUEST)
        w_max, entropy = stats.w_max, stats.entropy
        separation = w_max * -torch.expm1(-beta * (best[:, 0] - best[:, 1]))
        places.append(
            {
                "family": label,
                "n": n,
                "r": r,
                "beta": beta.median().item(),
                "entropy_share": entropy.median().item() / math.log(n),
                "separation": separation.median().item(),
                "w_max": w_max.median().item(),
                "violations": _violations(r, n, rank, w_max, entropy, separation),
            }
        )
        columns = (w_max[:SHOWN].tolist(), entropy[:SHOWN].tolist(), rank[:SHOWN].tolist())
        for weight, nats, k in zip(*columns, strict=True):
            points.append({"family": label, "n": n, "r": r, "w_max": weight, "entropy": nats, "rank": k})
    return places, points


def _violations(r: float, n: int, rank: Tensor, w_max: Tensor, entropy: Tensor, separation: Tensor) -> int:
    """In how many rows a bound fails by more than rounding."""
    if r > 1:
        wrong = (w_max < gaps.certificate(r, n) * (1 - ROUNDING)) | (entropy > gaps.entropy_bound(r))
    elif r < 1:
        wrong = (w_max > gaps.converse(r, rank) * (1 + ROUNDING)) | (separation > gaps.separation_bound(r))
    else:
        return 0
    return int(wrong.sum())


def _exponents(fits: dict[str, tuple[Family, list[ContactPoint]]], lengths: list[int]) -> tuple[Rows, list[Comparison]]:
    """ξ_Λ, ξ_α and ξ_Δ by family, and lines for the powers of ln n and, on the sphere, of n."""
    rows, lines = [], []
    for label, (family, contacts) in fits.items():
        found = gaps.fit_exponents(lengths, contacts)
        rows.append(_exponent_row(label, lengths, found))
        if isinstance(family, families.Sphere):
            power = _median_slope([math.log(n) for n in lengths], contacts)
            rows[-1] |= {"power": power.value, "power_error": power.error}
            where = f"{label}, n={lengths[0]}…{lengths[-1]}"
            lines.append(Comparison("power of n of median Λ", where, 2 / (family.d - 1), *power))
        elif family.exponent is not None and not family.random:
            where = f"{label}, n={lengths[0]}…{lengths[-1]}"
            lines.append(
                Comparison("ξ_Λ", where, family.exponent, found.accumulation.value, _error(found.accumulation))
            )
    return rows, lines


def _long_gaussian(rows: int) -> tuple[dict[str, Any], Comparison]:
    """ξ_Λ of the median over Gaussian rows so long that only their best scores can be drawn."""
    family = families.Gaussian()
    generator = torch.Generator().manual_seed(2)
    contacts = [gaps.contact_point(family.sample_best(n, rows, BEST, generator)) for n in LONG]
    found = _median_slope([math.log(math.log(n)) for n in LONG], contacts)
    row = _exponent_row("gaussian, best scores", LONG, gaps.fit_exponents(LONG, contacts))
    row |= {"xi_median": found.value, "xi_median_error": found.error}
    return row, Comparison("ξ_Λ of the median", "gaussian, n=2^16…2^40", 0.5, *found)


def _median_slope(x: list[float], contacts: list[ContactPoint]) -> Estimate:
    points = [median(contact.accumulation.log()) for contact in contacts]
    return slope(x, [point.value for point in points], [point.error for point in points])


def _exponent_row(label: str, lengths: list[int], found: gaps.Exponents) -> dict[str, Any]:
    return {
        "family": label,
        "n": f"{lengths[0]}…{lengths[-1]}",
        "xi_accumulation": found.accumulation.value,
        "xi_accumulation_error": found.accumulation.error,
        "xi_share": found.share.value,
        "xi_gap": found.gap.value,
        "residual": found.residual,
    }


def _of_laws(laws: Rows) -> list[Comparison]:
    n = max(row["n"] for row in laws)
    lines = []
    for row in laws:
        if row["n"] == n:
            found = Estimate(row["median"], row["median_error"])
            lines.append(
                Comparison("median Λ", f"{row['family']}, n={n}", row["predicted"], found.value, _error(found))
            )
    return lines


def _error(found: Estimate) -> float | None:
    """The standard error, but None where nothing is random and it is one of rounding."""
    return found.error if found.error > ROUNDING * abs(found.value) else None


def _of_transition(places: Rows) -> list[Comparison]:
    n = max(row["n"] for row in places)
    lines = []
    for row in places:
        if row["n"] == n and row["family"] in ("simplex", "cluster") and row["r"] in (0.5, 1.0, 2.0):
            exact = gaps.two_level_entropy(n, row["r"]) / math.log(n)
            lines.append(
                Comparison("entropy/ln n", f"{row['family']}, r={row['r']:g}, n={n}", exact, row["entropy_share"])
            )
    broken = sum(row["violations"] for row in places)
    return [*lines, Comparison("rows that break a bound", "all families, n and r", 0.0, float(broken))]
