"""Λ of every score family against its law, its exponents, the transition at β = Λ, and the bounds on each row."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from attnscale.statistics import StatsRequest, row_statistics
from attnscale.theory import families, gap_counting
from attnscale.theory.estimates import ROUNDING, Estimate, median, slope
from attnscale.theory.experiments import (
    GREY,
    Comparison,
    Experiment,
    Kind,
    Picture,
    Progress,
    Rows,
    line_style,
    new_figure,
)
from attnscale.theory.families import Family
from attnscale.theory.gap_counting import ContactPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CRITICALITIES = [2 ** (step / 2) for step in range(-10, 9)]  # r = β/Λ
TWO_LEVELS = ("simplex", "cluster")  # one key ahead of equal others: closed forms at every n
REQUEST = StatsRequest(lse=False, max_logit=False)
SHOWN = 6  # rows per family, n and r in the figure of the bounds
LONG = [2**power for power in range(16, 41, 4)]  # Gaussian rows: corrections to their exponent vanish like ln ln n/ln n
BEST = 512  # scores sampled from a long row; its contact point is nearly always among them

Corner = Literal["upper left", "upper right"]


class Sizes(NamedTuple):
    """Sample sizes: lengths, most scores and rows per length, rows of the transition, and long Gaussian rows."""

    lengths: list[int]
    scores: int
    rows: int
    transition_rows: int
    long_rows: int


QUICK = Sizes([2**power for power in range(6, 13, 2)], 1 << 20, 2048, 48, 2048)
FULL = Sizes([2**power for power in range(6, 17, 2)], 1 << 24, 4096, 64, 8192)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Measure Λ and its contact point over n for every family, and the weights of the same rows at β = rΛ."""
    sizes = QUICK if quick else FULL
    laws, transition, certified = Rows(), Rows(), Rows()
    fits: dict[str, tuple[Family, list[ContactPoint]]] = {}
    members = _members()
    for step, (label, family) in enumerate(members.items()):
        if progress is not None:
            progress(step, len(members), label)
        ratio = median(gap_counting.limit_ratio(family, 4000, torch.Generator().manual_seed(1)))
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
    ends = Rows(row for row in transition if row["n"] in (sizes.lengths[0], sizes.lengths[-1]))
    lines = [line, *lines, Comparison("max |ξ_Λ − ξ_α + ξ_Δ − 1|", "all families", 0.0, worst)]
    return Experiment(
        "gaps",
        [*lines, *_of_laws(laws), *_of_transition(transition)],
        {"laws": laws, "exponents": exponents, "transition": transition, "rows": certified},
        {
            "laws": Picture(laws_figure, {"laws": laws}),
            "transition": Picture(transition_figure, {"transition": transition}),
            "bounds": Picture(bounds_figure, {"rows": certified, "bounds": _bounds()}),
        },
        (
            Picture(draw_laws, {"laws": laws}),
            Picture(partial(draw_transition, quantity="separation"), {"transition": ends}),
        ),
    )


def _members() -> dict[str, Family]:
    """The measured families by their names in tables and legends."""
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
    """Contact points of all rows, and the scores of the first rows for the transition."""
    rows = 2 if family.exact else max(sizes.transition_rows, min(sizes.rows, sizes.scores // n))
    chunk = max(sizes.transition_rows, (1 << 19) // n)
    parts, kept = [], None
    for start in range(0, rows, chunk):
        scores = family.sample(n, min(chunk, rows - start), generator)
        parts.append(gap_counting.contact_point(scores))
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
    """Entropy, w_max and w_(1) − w_(2) of rows at β = rΛ with the Λ of each row, and the number of broken bounds."""
    rows = len(scores)
    accumulation, rank = contact.accumulation[:rows], contact.rank[:rows]
    best = scores.topk(2, dim=-1).values
    places, points = Rows(), Rows()
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
                "separation_bound": gap_counting.separation_bound(r) if r < 1 else None,
                "violations": _violations(r, n, rank, w_max, entropy, separation),
            }
        )
        columns = (w_max[:SHOWN].tolist(), entropy[:SHOWN].tolist(), rank[:SHOWN].tolist())
        for weight, nats, k in zip(*columns, strict=True):
            points.append({"family": label, "n": n, "r": r, "w_max": weight, "entropy": nats, "rank": k})
    return places, points


def _violations(r: float, n: int, rank: Tensor, w_max: Tensor, entropy: Tensor, separation: Tensor) -> int:
    """The number of rows that break a bound by more than rounding."""
    if r > 1:
        wrong = (w_max < gap_counting.certificate(r, n) * (1 - ROUNDING)) | (entropy > gap_counting.entropy_bound(r))
    elif r < 1:
        wrong = (w_max > gap_counting.converse(r, rank) * (1 + ROUNDING)) | (
            separation > gap_counting.separation_bound(r)
        )
    else:
        return 0
    return int(wrong.sum())


def _exponents(fits: dict[str, tuple[Family, list[ContactPoint]]], lengths: list[int]) -> tuple[Rows, list[Comparison]]:
    """ξ_Λ, ξ_α and ξ_Δ by family, and comparisons of the powers of ln n and, on the sphere, of n."""
    rows, lines = Rows(), []
    for label, (family, contacts) in fits.items():
        found = gap_counting.fit_exponents(lengths, contacts)
        rows.append(_exponent_row(label, lengths, found))
        where = f"{label}, n={lengths[0]}…{lengths[-1]}"
        if isinstance(family, families.Sphere):
            power = _median_slope([math.log(n) for n in lengths], contacts)
            rows[-1] |= {"power": power.value, "power_error": power.error}
            lines.append(Comparison("power of n of median Λ", where, 2 / (family.d - 1), *power, "limit"))
        elif family.exponent is not None and not family.random:
            xi = found.accumulation
            kind: Kind = "exact" if label in TWO_LEVELS else "limit"
            lines.append(Comparison("ξ_Λ", where, family.exponent, xi.value, xi.random_error, kind))
    return rows, lines


def _long_gaussian(rows: int) -> tuple[dict[str, Any], Comparison]:
    """ξ_Λ of the median Λ of Gaussian rows that are too long to sample whole: only their best scores are drawn."""
    family = families.Gaussian()
    generator = torch.Generator().manual_seed(2)
    contacts = [gap_counting.contact_point(family.sample_best(n, rows, BEST, generator)) for n in LONG]
    found = _median_slope([math.log(math.log(n)) for n in LONG], contacts)
    row = _exponent_row("gaussian, best scores", LONG, gap_counting.fit_exponents(LONG, contacts))
    row |= {"xi_median": found.value, "xi_median_error": found.error}
    return row, Comparison("ξ_Λ of the median", "gaussian, n=2^16…2^40", 0.5, *found, "limit")


def _median_slope(x: list[float], contacts: list[ContactPoint]) -> Estimate:
    points = [median(contact.accumulation.log()) for contact in contacts]
    return slope(x, [point.value for point in points], [point.error for point in points])


def _exponent_row(label: str, lengths: list[int], found: gap_counting.Exponents) -> dict[str, Any]:
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
    n = max(laws.column("n"))
    lines = []
    for row in laws.where(n=n):
        error = Estimate(row["median"], row["median_error"]).random_error
        kind: Kind = "exact" if error is None else "limit"
        values = (row["predicted"], row["median"], error, kind, row["predicted_error"])
        lines.append(Comparison("median Λ", f"{row['family']}, n={n}", *values))
    return lines


def _of_transition(places: Rows) -> list[Comparison]:
    n = max(places.column("n"))
    lines = []
    for row in places.where(n=n):
        if row["family"] in TWO_LEVELS and row["r"] in (0.5, 1.0, 2.0):
            exact = gap_counting.two_level_entropy(n, row["r"]) / math.log(n)
            where = f"{row['family']}, r={row['r']:g}, n={n}"
            lines.append(Comparison("entropy/ln n", where, exact, row["entropy_share"]))
    broken = float(sum(places.column("violations")))
    return [*lines, Comparison("rows that break a bound", "all families, n and r", 0.0, broken, kind="bound")]


def _bounds() -> Rows:
    """The bounds for β > Λ over r = β/Λ."""
    steps = (2 ** (0.05 + step / 20) for step in range(80))
    return Rows(
        {"r": r, "certificate": gap_counting.certificate(r), "entropy_bound": gap_counting.entropy_bound(r)}
        for r in steps
    )


def laws_figure(rows: Rows) -> Figure:
    """Λ against n with the law of each family, and measured over predicted."""
    figure, (curves, ratios) = new_figure(columns=2, size=(5.6, 4.4))
    draw_laws(curves, rows)
    for place, _, chosen in rows.series("family"):
        shares = Rows(
            {"n": row["n"], "y": row["median"] / row["predicted"], "error": row["median_error"] / row["predicted"]}
            for row in chosen
        )
        look = {"linewidth": 1.1, "linestyle": line_style(place)["linestyle"]}
        shares.error_bars(ratios, "n", place, "y", "error", **look)
    ratios.axhline(1, color="black", linewidth=1)
    ratios.set_xscale("log", base=2)
    ratios.set(xlabel="keys n", ylabel="median Λ, measured/predicted")
    ratios.set_title("± 2 standard errors; Gaussian rows converge slowly", loc="left", fontsize=10)
    return figure


def draw_laws(axes: Axes, rows: Rows) -> None:
    """Median Λ of each family against n: markers measured, lines predicted."""
    for place, family, chosen in rows.series("family"):
        chosen.line(axes, "n", "predicted", place, linewidth=1.2)
        chosen.points(axes, "n", "median", place)
        axes.plot([], [], markersize=5, linewidth=1.2, label=family, **line_style(place))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=200 * max(rows.column("median")))  # room for the legend
    axes.set(xlabel="keys n", ylabel="accumulation scale Λ, 1/score")
    axes.set_title("Λ: median measured (markers), its law (lines)", loc="left", fontsize=10)
    axes.legend(loc="upper left", frameon=False, fontsize=7.5, ncols=2, handlelength=3)


def transition_figure(rows: Rows) -> Figure:
    """Entropy against β, and entropy and w_(1) − w_(2) against β/Λ, for the shortest and the longest rows."""
    figure, (raw, entropy, separation) = new_figure(columns=3, size=(4.4, 4.1))
    draw_transition(raw, rows, over="beta", legend=None)
    draw_transition(entropy, rows, legend="upper right")
    draw_transition(separation, rows, quantity="separation", legend=None)
    raw.set_title("over β: one curve per family", loc="left", fontsize=10)
    bound = Rows(row for row in rows.where(family=rows[0]["family"], n=rows[0]["n"]) if row["r"] < 1)
    bound.line(separation, "r", "separation_bound", 0, color=GREY, linestyle="solid", linewidth=1.2)
    look: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": GREY}
    place = (bound[-3]["r"], bound[-3]["separation_bound"])
    separation.annotate("bound r/(e(1−r))", place, xytext=(-92, 2), **look)
    return figure


def draw_transition(
    axes: Axes, rows: Rows, quantity: str = "entropy_share", over: str = "r", legend: Corner | None = "upper left"
) -> None:
    """A statistic of the weights against β/Λ or β: thin lines for the shortest rows, markers for the longest."""
    lengths = rows.distinct("n")
    for place, family, chosen in rows.series("family"):
        thin, bold = (chosen.where(n=n) for n in (lengths[0], lengths[-1]))
        thin.line(axes, over, quantity, place, linestyle="solid", linewidth=0.6, alpha=0.7)
        look = line_style(place) | {"markersize": 4, "linewidth": 1.3, "markevery": (place % 3, 3)}
        bold.line(axes, over, quantity, place, label=family, **look)
    axes.set_xscale("log", base=10 if over == "beta" else 2)
    if over == "r":
        axes.axvline(1, color="black", linewidth=1, linestyle=(0, (4, 3)))
    label = {"entropy_share": "entropy/ln n", "separation": "w₁ − w₂"}[quantity]
    axes.set(xlabel="β/Λ" if over == "r" else "β, 1/score", ylabel=f"{label}, median of rows", ylim=(-0.03, 1.03))
    title = f"bold n = 2^{round(math.log2(lengths[-1]))}, thin n = 2^{round(math.log2(lengths[0]))}"
    axes.set_title(f"over β/Λ: {title}" if over == "r" else title, loc="left", fontsize=10)
    if legend is not None:
        axes.legend(loc=legend, frameon=False, fontsize=7, handlelength=3)


def bounds_figure(rows: Rows, bounds: Rows) -> Figure:
    """Rows against the bounds at their β/Λ: w_max for β > Λ, w_max for β < Λ, and entropy for β > Λ."""
    figure, (above, below, entropy) = new_figure(columns=3, size=(4.2, 3.8))
    for place, family, chosen in rows.series("family"):
        look = {"markersize": 3.5, "alpha": 0.5}
        high = Rows(row | {"entropy": max(row["entropy"], 1e-6)} for row in chosen if row["r"] > 1)
        low = Rows(row | {"bound": row["rank"] ** (row["r"] - 1)} for row in chosen if row["r"] < 1)
        high.points(above, "r", "w_max", place, label=family, **look)
        low.points(below, "bound", "w_max", place, **look)
        high.points(entropy, "r", "entropy", place, **look)
    bounds.line(above, "r", "certificate", 0, linewidth=1.6)
    above.set(xlabel="β/Λ", ylabel="w_max", ylim=(0, 1.03))
    above.set_title("β > Λ: w_max is at least the line, 1/ζ(β/Λ)", loc="left", fontsize=10)
    ends = [1e-6, 1]
    below.plot(ends, ends, color="black", linewidth=1.6)
    below.set(xscale="log", yscale="log", xlabel="k*^−(1−β/Λ)", ylabel="w_max")
    below.set_title("β < Λ: w_max is at most the line", loc="left", fontsize=10)
    bounds.line(entropy, "r", "entropy_bound", 0, linewidth=1.6)
    entropy.set(yscale="log", xlabel="β/Λ", ylabel="entropy, nats", ylim=(5e-7, 1e3))
    entropy.set_title("β > Λ: entropy is at most the line", loc="left", fontsize=10)
    for axes in (above, entropy):
        axes.set_xscale("log", base=2)
    above.legend(loc="lower right", frameon=False, fontsize=7, ncols=2)
    return figure
