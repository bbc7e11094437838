"""Keys on the sphere: the three regimes, the Poisson limit, the critical scale and its range of validity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnscale.attention import attention_with_stats
from attnscale.theory import sphere
from attnscale.theory.estimates import Estimate, mean, median, slope
from attnscale.theory.experiments import (
    DASHES,
    GREY,
    REFERENCE,
    Comparison,
    Experiment,
    Kind,
    Picture,
    Progress,
    Rows,
    collect,
    line_style,
    new_figure,
)
from attnscale.theory.phase import directions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORDERED = 12  # ordered weights in the figure
HEAT_TILT = 1.5  # concentration of the key density in the heat step


class Sizes(NamedTuple):
    """Sample sizes: keys and rows, draws of the limit, batches of the heat step, and lengths of growing contexts."""

    n: int
    rows: int
    draws: int
    heat_batches: int
    lengths: tuple[int, ...]


QUICK = Sizes(4096, 120, 4000, 8, (2**8, 2**10, 2**12))
FULL = Sizes(2**14, 400, 20000, 24, (2**8, 2**10, 2**12, 2**14))


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Compare every regime with simulated rows; `quick` takes fewer rows and shorter contexts."""
    sizes = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(1)
    lines: list[Comparison] = []
    tables = (
        ("ordered weights at λ = 1", "weights", _critical),
        ("largest weight against λ", "regimes", _regimes),
        ("bias and fluctuations below β*", "subcritical", _subcritical),
        ("backward heat step", "heat", _heat),
        ("densities that agree or differ at the query", "local_exponent", _local_exponent),
        ("growing dimension", "dimension", _dimension),
    )
    data = collect([(title, name, partial(step, sizes, generator, lines)) for title, name, step in tables], progress)
    figures = {
        "weights": Picture(draw_weights, {"weights": data["weights"]}),
        "regimes": Picture(draw_regimes, {name: data[name] for name in ("regimes", "subcritical")}),
        "local_exponent": Picture(draw_local_exponent, {"local_exponent": data["local_exponent"]}),
        "dimension": Picture(draw_dimension, {"dimension": data["dimension"]}),
    }
    return Experiment("sphere", lines, data, figures)


def _critical(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """At β = β*: ordered weights, entropy and output against the Poisson limit."""
    n, rows, draws = sizes.n, 2 * sizes.rows, sizes.draws
    found = Rows()
    for d in (3, 4, 5):
        law = sphere.uniform_law(d)
        beta = law.critical_beta(n)
        limit = sphere.draw_limit(1.0, law.exponent, draws, generator)
        parts: list[tuple[Tensor, ...]] = []
        for keys in sphere.batches(sphere.uniform(d), n, rows, generator):
            output, w_max, _ = sphere.attention_to(keys, beta)
            best = keys[..., 0].topk(ORDERED, dim=-1).values
            # The package returns the largest weight; the others follow from their scores.
            top = w_max[:, None] * (beta * (best - best[:, :1])).exp()
            parts.append((top, w_max, beta * (1.0 - output[:, 0]), beta * output[:, 1:].square().sum(-1)))
        ordered, largest, radial, tangential = map(torch.cat, zip(*parts, strict=True))
        where = f"d={d} n={n} λ=1"
        _compare(lines, "E w_max, Poisson limit", where, sphere.mean_largest_weight(1.0, law.exponent), largest)
        integral = sphere.mean_largest_weight_at(n, d, beta)
        _compare(lines, "E w_max, integral at this n", where, integral, largest, "exact")
        _compare(lines, "β*·E(1 − ⟨q, output⟩)", where, mean(limit.radial), radial)
        _compare(lines, "β*·E‖tangential output‖²", where, mean(limit.tangential), tangential)
        for rank in range(ORDERED):
            row = {"d": d, "n": n, "rank": rank + 1, "limit": float(limit.weights[:, rank].mean())}
            found.append(row | mean(ordered[:, rank]).columns())
    return found


def _regimes(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """E w_max from below to above β*, and the rate at which one key takes all weight."""
    n, rows = sizes.n // 2, sizes.rows
    ratios = [2.0**power for power in range(-5, 6)]
    found = Rows()
    for d in (3, 5):
        law = sphere.uniform_law(d)
        betas = [ratio * law.critical_beta(n) for ratio in ratios]
        readouts = sphere.simulate_at(sphere.uniform(d), n, betas, rows, generator)
        for ratio, readout in zip(ratios, readouts, strict=True):
            limit = sphere.mean_largest_weight(ratio, law.exponent)
            row = {"d": d, "n": n, "ratio": ratio, "limit": limit, **mean(readout.w_max).columns()}
            found.append(row | {"deficit": sphere.supercritical_deficit(ratio, law.exponent)})
        deficit = 1.0 - readouts[-1].w_max
        predicted = sphere.supercritical_deficit(32.0, law.exponent)
        _compare(lines, "E(1 − w_max)", f"d={d} n={n} λ=32", predicted, deficit)
    return found


def _subcritical(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """Below β*: the radial bias (d−1)/(2β), and Gaussian fluctuations of the tangential part."""
    n, rows = sizes.n, sizes.rows
    found = Rows()
    for d in (3, 5):
        ladder = [2.0**power for power in range(1, 8)]
        betas = [beta for beta in ladder if beta < 0.3 * sphere.critical_beta(n, d)]
        outputs = [found.output for found in sphere.simulate_at(sphere.uniform(d), n, betas, rows, generator)]
        for beta, output in zip(betas, outputs, strict=True):
            squares = output[:, 1:].square().mean(-1)
            predicted = sphere.subcritical_variance(n, d, beta)
            found.append(
                {"d": d, "n": n, "beta": beta, "bias": float(1.0 - output[:, 0].mean())}
                | {"bias_exact": 1.0 - sphere.mean_cosine(d, beta), "bias_first_order": (d - 1) / (2.0 * beta)}
                | {"variance": float(squares.mean()), "variance_predicted": predicted}
            )
        chosen, output = betas[-2], outputs[-2]
        where = f"d={d} n={n} β={chosen:g}"
        _compare(lines, "1 − ⟨q, output⟩", where, 1.0 - sphere.mean_cosine(d, chosen), 1.0 - output[:, 0])
        variance = sphere.subcritical_variance(n, d, chosen)
        _compare(lines, "tangential variance", where, variance, output[:, 1:].square().mean(-1))
        kurtosis = output[:, 1:].flatten() / math.sqrt(variance)
        moments = kurtosis**4 / float(kurtosis.square().mean()) ** 2
        _compare(lines, "4th moment/variance²", where, 3.0, moments)
    concentration, cosine, beta = 3.0, 0.5, 40.0
    read = sphere.simulate(sphere.tilted(concentration, cosine), n, beta, rows, generator)
    query, centre = sphere.tilted_centre(1.0), sphere.tilted_centre(cosine)
    gradient = concentration * (centre - cosine * query)
    first_order = sphere.subcritical_output(query, gradient, beta)
    total = beta * query + concentration * centre
    exact = sphere.mean_cosine(3, float(total.norm())) * total / total.norm()
    where = f"d=3 n={n} β={beta:g} r={concentration:g}"
    _compare(lines, "output along ∇log f, order 1/β", where, float(first_order[1]), read.output[:, 1])
    _compare(lines, "output along ∇log f, all orders", where, float(exact[1]), read.output[:, 1])
    return found


def _heat(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """Tokens drawn from a density f and moved by attention to keys from f: harmonics grow as in f − Δf/β."""
    n, tokens, batches = sizes.n // 2, 2 * sizes.rows, sizes.heat_batches
    density, centre = sphere.tilted(HEAT_TILT, 1.0), sphere.tilted_centre(1.0)
    betas = (20.0, 40.0, 80.0)
    growth: dict[tuple[float, int], list[tuple[Tensor, Tensor]]] = {}
    for _ in range(batches):
        keys, queries = density.draw(1, n, generator), density.draw(1, tokens, generator)
        for beta in betas:
            moved = attention_with_stats(queries, keys, keys, scale=beta).output
            expected = beta * queries + HEAT_TILT * centre  # the direction of the output for n → ∞
            for degree in (1, 2):
                means = [_harmonic(degree, directions(x)[0, :, 0]).mean() for x in (moved, expected, queries)]
                growth.setdefault((beta, degree), []).append((means[0] - means[2], means[1] - means[2]))
    found = Rows()
    for (beta, degree), pairs in growth.items():
        start = sphere.tilted_harmonic(HEAT_TILT, degree)
        measured, exact = (torch.stack(column) / start for column in zip(*pairs, strict=True))
        first_order = sphere.heat_growth(3, degree, beta) - 1.0
        found.append(
            {"degree": degree, "beta": beta, "first_order": first_order, "infinite_n": float(exact.mean())}
            | mean(measured).columns()
        )
        if beta == betas[-1]:
            where = f"ℓ={degree} β={beta:g} n={n}"
            _compare(lines, "growth of a harmonic", where, first_order, measured)
    return found


def _local_exponent(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """E w_max at the β* of uniform keys, for densities that differ far from the query and one that differs at it."""
    lengths, rows = sizes.lengths, sizes.rows
    d = 5
    uniform = sphere.uniform(d)
    densities = [uniform, sphere.far_keys_at(d, -1.0), sphere.far_keys_at(d, 0.0)]
    densities.append(sphere.partly_on_subsphere(d, 3, 0.5))
    found = Rows()
    for density in densities:
        distances, errors = [], []
        for n in lengths:
            betas = [law.critical_beta(n) for law in (density.law, uniform.law)]
            own, reference = (found.w_max for found in sphere.simulate_at(density, n, betas, rows, generator))
            limit = sphere.mean_largest_weight(1.0, density.law.exponent)
            found.append(
                {"density": density.name, "exponent": density.law.exponent, "n": n, "limit": limit}
                | {"at_own_scale": float(own.mean()), "own_error": mean(own).error}
                | {"at_uniform_scale": float(reference.mean()), "uniform_error": mean(reference).error}
            )
            # 1 − ⟨q, k⟩ of the nearest key scales as 1/β*.
            batches = sphere.batches(density, n, rows, generator)
            nearest = median(torch.cat([1.0 - keys[..., 0].amax(-1) for keys in batches]))
            distances.append(math.log(nearest.value))
            errors.append(nearest.error / nearest.value)
        fit = slope([math.log(n) for n in lengths], distances, errors)
        exponent = 1.0 / density.law.exponent
        lines.append(Comparison("growth exponent 1/κ of β*", density.name, exponent, -fit.value, fit.error, "limit"))
        _compare(lines, "E w_max at the own β*", f"{density.name} n={n}", limit, own)
    return found


def _dimension(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> Rows:
    """E w_max at β* against d at a fixed n: the power law of caps needs (nC_d)^(−2/(d−1)) ≪ 1."""
    n, rows = sizes.lengths[-2], sizes.rows // 2
    found = Rows()
    for d in (3, 5, 9, 17, 33, 65):
        law = sphere.uniform_law(d)
        beta = law.critical_beta(n)
        w_max = sphere.simulate(sphere.uniform(d), n, beta, rows, generator).w_max
        at_n = sphere.mean_largest_weight_at(n, d, beta)
        found.append(
            {"d": d, "n": n, "beta": beta, "limit": sphere.mean_largest_weight(1.0, law.exponent), "at_n": at_n}
            | mean(w_max).columns()
            | {"gaussian_beta": math.sqrt(2.0 * d * math.log(n)), "uniform_weight": 1.0 / n}
        )
        if d in (17, 65):
            _compare(lines, "E w_max, integral at this n", f"d={d} n={n} β=β*={beta:.3g}", at_n, w_max, "exact")
    return found


def _harmonic(degree: int, cosine: Tensor) -> Tensor:
    """The Legendre polynomial of degree 1 or 2."""
    return cosine if degree == 1 else 1.5 * cosine.square() - 0.5


def _compare(
    lines: list[Comparison],
    quantity: str,
    parameters: str,
    predicted: float | Estimate,
    values: Tensor,
    kind: Kind = "limit",
) -> None:
    """Compare the mean of samples with a prediction, which may itself be sampled."""
    expected, error = predicted if isinstance(predicted, Estimate) else (predicted, 0.0)
    lines.append(Comparison(quantity, parameters, expected, *mean(values), kind, error))


def draw_weights(rows: Rows) -> Figure:
    """Ordered weights at the critical scale against the Poisson limit."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    _against_limit(axes, rows, "rank")
    axes.set(yscale="log", xlabel="rank k of the key", ylabel="mean weight")
    axes.set_ylim(1e-5, 1)
    axes.set_title("Ordered weights at β = β*; lines: Poisson limit")
    axes.legend(frameon=False, loc="lower left")
    return figure


def draw_regimes(regimes: Rows, subcritical: Rows) -> Figure:
    """The largest weight through the transition, and bias against fluctuation below it."""
    figure, (left, right) = new_figure(columns=2, size=(5.2, 4.0))
    _against_limit(left, regimes, "ratio")
    left.axvline(1.0, color=GREY, linewidth=0.8)
    left.set(xscale="log", xlabel="λ = β/β*", ylabel="E w_max", title="Through the transition; lines: Poisson limit")
    left.legend(frameon=False, loc="upper left")
    quantities = (
        ("bias 1 − ⟨q, out⟩", "bias", "bias_exact", 1.0),
        ("tangential deviation", "variance", "variance_predicted", 0.5),
    )
    for index, d, part in subcritical.series("d"):
        for place, (name, measured, predicted, power) in enumerate(quantities, start=2 * index):
            shown = Rows(row | {column: row[column] ** power for column in (measured, predicted)} for row in part)
            shown.line(right, "beta", predicted, place)
            shown.points(right, "beta", measured, place, label=f"{name}, d = {d}")
    right.set(xscale="log", yscale="log", xlabel="β", ylabel="distance of the output from the query")
    right.set_title("Below β*: points measured, lines predicted")
    right.set_ylim(bottom=4e-4)
    right.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def draw_local_exponent(rows: Rows) -> Figure:
    """E w_max at the scale of uniform keys and at the scale of each density."""
    figure, panels = new_figure(columns=2, size=(5.2, 4.0))
    for axes, columns, title in (
        (panels[0], ("at_uniform_scale", "uniform_error"), "at β* of uniform keys, (n·C₅)^(1/2)"),
        (panels[1], ("at_own_scale", "own_error"), "at β* of the density's own local law"),
    ):
        for place, name, part in rows.series("density"):
            # A small shift keeps densities visible that would lie on top of each other.
            shifted = Rows(row | {"n": row["n"] * 1.08**place} for row in part)
            look = {"capsize": 2, "linestyle": line_style(place)["linestyle"]}
            shifted.error_bars(axes, "n", place, *columns, label=name, **look)
        for limit, exponent in sorted({(row["limit"], row["exponent"]) for row in rows}):
            axes.axhline(limit, **REFERENCE)
            shift = 3 if exponent < 2 else -11
            look = {"xytext": (20, shift), "textcoords": "offset points", "color": GREY, "fontsize": 8}
            axes.annotate(f"limit for κ = {exponent:g}", (shifted[0]["n"], limit), **look)
        axes.set(xscale="log", xlabel="n", ylabel="E w_max", title=title, ylim=(0, 0.8))
        _label_ticks(axes, rows.distinct("n"))
    panels[0].legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def draw_dimension(rows: Rows) -> Figure:
    """E w_max against the dimension at a fixed n, with the limit and the integral at this n."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    dims, uniform = rows.column("d"), rows[0]["uniform_weight"]
    rows.line(axes, "d", "limit", 2, linestyle=DASHES[1], label="Poisson limit, n → ∞")
    rows.line(axes, "d", "at_n", 1, linestyle="solid", label=f"integral at n = {rows[0]['n']}")
    rows.error_bars(axes, "d", 0, label="measured", capsize=2)
    axes.axhline(uniform, **REFERENCE)
    axes.annotate("1/n", (dims[0], uniform), xytext=(0, 3), textcoords="offset points", color=GREY)
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="E w_max at β = β*", ylim=(1e-6, 1))
    _label_ticks(axes, dims)
    axes.set_title("At a fixed n the limit holds for small d only")
    axes.legend(frameon=False, loc="upper right")
    return figure


def _against_limit(axes: Axes, rows: Rows, column: str) -> None:
    """Measured values over a column with the limit as a line, one series per dimension."""
    for place, d, part in rows.series("d"):
        part.line(axes, column, "limit", place)
        part.error_bars(axes, column, place, label=f"d = {d}, n = {part[0]['n']}", capsize=2)


def _label_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
