"""Keys on the sphere (seed 001): three regimes, the Poisson limit, what sets the scale, and where it fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnscale.attention import attention_with_stats
from attnscale.theory import poisson, sphere
from attnscale.theory.estimates import mean, median, slope
from attnscale.theory.experiment import Comparison, Experiment, Progress
from attnscale.theory.files import COLOURS, DASHES, GREY, MARKERS, new_figure
from attnscale.theory.phase import directions
from attnscale.theory.sphere import KeyDensity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ORDERED = 12  # how many of the ordered weights are shown
HEAT_TILT = 1.5  # concentration of the density that the heat step sharpens

Rows = list[dict[str, Any]]


class Sizes(NamedTuple):
    """How much is sampled: keys and rows, draws of the limit, batches of the heat step, and growing contexts."""

    n: int
    rows: int
    draws: int
    heat_batches: int
    lengths: tuple[int, ...]


QUICK = Sizes(4096, 120, 4000, 8, (2**8, 2**10, 2**12))
FULL = Sizes(2**14, 400, 20000, 24, (2**8, 2**10, 2**12, 2**14))


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Compare every regime of seed 001 with simulated rows; quick takes fewer rows and shorter contexts."""
    sizes = QUICK if quick else FULL
    generator = torch.Generator().manual_seed(1)
    lines: list[Comparison] = []
    data: dict[str, list[dict[str, Any]]] = {}
    steps = (
        ("ordered weights at λ = 1", "weights", _critical),
        ("largest weight against λ", "regimes", _regimes),
        ("bias and fluctuations below β*", "subcritical", _subcritical),
        ("backward heat step", "heat", _heat),
        ("densities alike and unlike at the query", "local_exponent", _local_exponent),
        ("growing dimension", "dimension", _dimension),
    )
    for done, (title, name, step) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), title)
        data[name] = step(sizes, generator, lines)
    if progress is not None:
        progress(len(steps), len(steps), "done")
    drawn = {
        "weights": lambda: draw_weights(data["weights"]),
        "regimes": lambda: draw_regimes(data["regimes"], data["subcritical"]),
        "local_exponent": lambda: draw_local_exponent(data["local_exponent"]),
        "dimension": lambda: draw_dimension(data["dimension"]),
    }
    return Experiment("sphere", lines, data, drawn)


def _critical(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """At β = β*: ordered weights, entropy and output against the Poisson limit."""
    n, rows, draws = sizes.n, 2 * sizes.rows, sizes.draws
    found = []
    for d in (3, 4, 5):
        law = sphere.uniform_law(d)
        beta = law.critical_beta(n)
        limit = poisson.draw_limit(1.0, law.exponent, draws, generator)
        top, entropies, radial, tangential, largest = [], [], [], [], []
        for keys in sphere.batches(sphere.uniform(d), n, rows, generator):
            read = sphere.read(keys, beta)
            best = keys[..., 0].topk(ORDERED, dim=-1).values
            # The largest weight is that of the package; the others follow from their scores.
            top.append(read.w_max[:, None] * (beta * (best - best[:, :1])).exp())
            largest.append(read.w_max)
            entropies.append(read.entropy)
            radial.append(beta * (1.0 - read.output[:, 0]))
            tangential.append(beta * read.output[:, 1:].square().sum(-1))
        where = f"d={d} n={n} λ=1"
        w_max = torch.cat(largest)
        _compare(lines, "E w_max, Poisson limit", where, poisson.mean_largest_weight(1.0, law.exponent), w_max)
        _compare(lines, "E w_max, integral at this n", where, poisson.mean_largest_weight_at(n, d, beta), w_max)
        _compare(lines, "β*·E(1 − ⟨q, output⟩)", where, float(limit.radial.mean()), torch.cat(radial))
        _compare(lines, "β*·E‖tangential output‖²", where, float(limit.tangential.mean()), torch.cat(tangential))
        ordered = torch.cat(top)
        for rank in range(ORDERED):
            measured = ordered[:, rank]
            found.append(
                {"d": d, "n": n, "rank": rank + 1, "limit": float(limit.weights[:, rank].mean())}
                | {"measured": float(measured.mean()), "standard_error": mean(measured).error}
            )
    return found


def _regimes(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """E w_max from below to above β*, and the rate at which one key takes all."""
    n, rows = sizes.n // 2, sizes.rows
    ratios = [2.0**power for power in range(-5, 6)]
    found = []
    for d in (3, 5):
        law = sphere.uniform_law(d)
        largest: dict[float, list[Tensor]] = {ratio: [] for ratio in ratios}
        for keys in sphere.batches(sphere.uniform(d), n, rows, generator):
            for ratio in ratios:
                largest[ratio].append(sphere.read(keys, ratio * law.critical_beta(n)).w_max)
        for ratio in ratios:
            w_max = torch.cat(largest[ratio])
            limit = poisson.mean_largest_weight(ratio, law.exponent)
            found.append(
                {"d": d, "n": n, "ratio": ratio, "limit": limit, "measured": float(w_max.mean())}
                | {"standard_error": mean(w_max).error, "deficit": sphere.supercritical_deficit(ratio, law.exponent)}
            )
        deficit = 1.0 - torch.cat(largest[32.0])
        predicted = sphere.supercritical_deficit(32.0, law.exponent)
        _compare(lines, "E(1 − w_max) = ln 2·κΓ(2−1/κ)/λ", f"d={d} n={n} λ=32", predicted, deficit)
    return found


def _subcritical(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """Below β*: the radial bias (d−1)/(2β), and Gaussian fluctuations of the tangential part."""
    n, rows = sizes.n, sizes.rows
    found = []
    for d in (3, 5):
        ladder = [2.0**power for power in range(1, 8)]
        betas = [beta for beta in ladder if beta < 0.3 * sphere.critical_beta(n, d)]
        parts: dict[float, list[Tensor]] = {beta: [] for beta in betas}
        for keys in sphere.batches(sphere.uniform(d), n, rows, generator):
            for beta in betas:
                parts[beta].append(sphere.read(keys, beta).output)
        for beta in betas:
            output = torch.cat(parts[beta])
            squares = output[:, 1:].square().mean(-1)
            predicted = sphere.subcritical_variance(n, d, beta)
            found.append(
                {"d": d, "n": n, "beta": beta, "bias": float(1.0 - output[:, 0].mean())}
                | {"bias_exact": 1.0 - sphere.mean_cosine(d, beta), "bias_first_order": (d - 1) / (2.0 * beta)}
                | {"variance": float(squares.mean()), "variance_predicted": predicted}
            )
        chosen = betas[-2]
        output = torch.cat(parts[chosen])
        where = f"d={d} n={n} β={chosen:g}"
        _compare(lines, "1 − ⟨q, output⟩ = 1 − A_d(β)", where, 1.0 - sphere.mean_cosine(d, chosen), 1.0 - output[:, 0])
        variance = sphere.subcritical_variance(n, d, chosen)
        _compare(lines, "tangential variance", where, variance, output[:, 1:].square().mean(-1))
        kurtosis = output[:, 1:].flatten() / math.sqrt(variance)
        _compare(lines, "4th moment of the fluctuation (Gaussian: 3)", where, 3.0, kurtosis**4 / _second(kurtosis) ** 2)
    concentration, cosine, beta = 3.0, 0.5, 40.0
    read = sphere.attend(sphere.tilted(concentration, cosine), n, beta, rows, generator)
    query, centre = sphere.tilted_centre(1.0), sphere.tilted_centre(cosine)
    gradient = concentration * (centre - cosine * query)
    first_order = sphere.subcritical_output(query, gradient, beta)
    total = beta * query + concentration * centre
    exact = sphere.mean_cosine(3, float(total.norm())) * total / total.norm()
    where = f"d=3 n={n} β={beta:g} r={concentration:g}"
    _compare(lines, "output along ∇log f, first order", where, float(first_order[1]), read.output[:, 1])
    _compare(lines, "output along ∇log f, exact for n → ∞", where, float(exact[1]), read.output[:, 1])
    return found


def _heat(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """Tokens drawn from a density f and moved by attention to keys from f: harmonics grow as f − Δf/β has them."""
    n, tokens, batches = sizes.n // 2, 2 * sizes.rows, sizes.heat_batches
    density, centre = sphere.tilted(HEAT_TILT, 1.0), sphere.tilted_centre(1.0)
    betas, harmonics = (20.0, 40.0, 80.0), {1: _degree_one, 2: _degree_two}
    growth: dict[tuple[float, int], list[tuple[Tensor, Tensor]]] = {}
    for _ in range(batches):
        keys, queries = density.draw(1, n, generator), density.draw(1, tokens, generator)
        for beta in betas:
            moved = attention_with_stats(queries, keys, keys, scale=beta).output
            expected = beta * queries + HEAT_TILT * centre  # the direction of the output for n → ∞
            for degree, harmonic in harmonics.items():
                means = [harmonic(directions(x)[0, :, 0]).mean() for x in (moved, expected, queries)]
                growth.setdefault((beta, degree), []).append((means[0] - means[2], means[1] - means[2]))
    found = []
    for (beta, degree), pairs in growth.items():
        start = sphere.tilted_harmonic(HEAT_TILT, degree)
        measured, exact = (torch.stack(column) / start for column in zip(*pairs, strict=True))
        first_order = sphere.heat_growth(3, degree, beta) - 1.0
        found.append(
            {"degree": degree, "beta": beta, "first_order": first_order, "infinite_n": float(exact.mean())}
            | {"measured": float(measured.mean()), "standard_error": mean(measured).error}
        )
        if beta == betas[-1]:
            where = f"ℓ={degree} β={beta:g} n={n}"
            _compare(lines, "relative growth ℓ(ℓ+d−2)/β of a harmonic", where, first_order, measured)
    return found


def _local_exponent(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """E w_max at the β* of uniform keys: densities that differ far away only, and one that differs at the query."""
    lengths, rows = sizes.lengths, sizes.rows
    d = 5
    uniform = sphere.uniform(d)
    densities = [uniform, sphere.far_keys_at(d, -1.0), sphere.far_keys_at(d, 0.0)]
    densities.append(sphere.partly_on_subsphere(d, 3, 0.5))
    found = []
    for density in densities:
        distances, errors = [], []
        for n in lengths:
            own, reference = _largest(
                density, n, rows, generator, density.law.critical_beta(n), uniform.law.critical_beta(n)
            )
            limit = poisson.mean_largest_weight(1.0, density.law.exponent)
            found.append(
                {"density": density.name, "exponent": density.law.exponent, "n": n, "limit": limit}
                | {"at_own_scale": float(own.mean()), "own_error": mean(own).error}
                | {"at_uniform_scale": float(reference.mean()), "uniform_error": mean(reference).error}
            )
            nearest = median(_nearest(density, n, rows, generator))
            distances.append(math.log(nearest.value))
            errors.append(nearest.error / nearest.value)
        fit = slope([math.log(n) for n in lengths], distances, errors)
        exponent = 1.0 / density.law.exponent
        lines.append(Comparison("growth exponent of β* = 1/κ", density.name, exponent, -fit.value, fit.error))
        _compare(lines, "E w_max at the own β*", f"{density.name} n={n}", limit, own)
    return found


def _dimension(sizes: Sizes, generator: torch.Generator, lines: list[Comparison]) -> list[dict[str, Any]]:
    """E w_max at β* against d at a fixed n: the power law of caps holds only while (nC_d)^(−2/(d−1)) is small."""
    n, rows = sizes.lengths[-2], sizes.rows // 2
    found = []
    for d in (3, 5, 9, 17, 33, 65):
        law = sphere.uniform_law(d)
        beta = law.critical_beta(n)
        w_max = sphere.attend(sphere.uniform(d), n, beta, rows, generator).w_max
        at_n = poisson.mean_largest_weight_at(n, d, beta)
        found.append(
            {"d": d, "n": n, "beta": beta, "limit": poisson.mean_largest_weight(1.0, law.exponent), "at_n": at_n}
            | {"measured": float(w_max.mean()), "standard_error": mean(w_max).error}
            | {"gaussian_beta": math.sqrt(2.0 * d * math.log(n)), "uniform_weight": 1.0 / n}
        )
        if d in (17, 65):
            _compare(lines, "E w_max, integral at this n", f"d={d} n={n} β=β*={beta:.3g}", at_n, w_max)
    return found


def _largest(density: KeyDensity, n: int, rows: int, generator: torch.Generator, *betas: float) -> list[Tensor]:
    """w_max of the same rows at several β."""
    parts = [[sphere.read(keys, beta).w_max for beta in betas] for keys in sphere.batches(density, n, rows, generator)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _nearest(density: KeyDensity, n: int, rows: int, generator: torch.Generator) -> Tensor:
    """1 − ⟨q, k⟩ of the nearest key: it scales as 1/β*."""
    return torch.cat([1.0 - keys[..., 0].amax(-1) for keys in sphere.batches(density, n, rows, generator)])


def _degree_one(cosine: Tensor) -> Tensor:
    return cosine


def _degree_two(cosine: Tensor) -> Tensor:
    return 1.5 * cosine.square() - 0.5


def _second(values: Tensor) -> float:
    return float(values.square().mean())


def _compare(lines: list[Comparison], quantity: str, parameters: str, predicted: float, values: Tensor) -> None:
    lines.append(Comparison(quantity, parameters, predicted, *mean(values)))


def draw_weights(rows: Rows) -> Figure:
    """Ordered weights at the critical scale against the Poisson limit."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    for index, d in enumerate(_values(rows, "d")):
        part = [row for row in rows if row["d"] == d]
        ranks = [row["rank"] for row in part]
        axes.plot(ranks, [row["limit"] for row in part], color=COLOURS[index], linestyle=DASHES[index])
        _points(axes, ranks, part, index, f"d = {d}, n = {part[0]['n']}")
    axes.set(yscale="log", xlabel="rank k of the key", ylabel="mean weight")
    axes.set_ylim(1e-5, 1)
    axes.set_title("Ordered weights at β = β*; lines: Poisson limit")
    axes.legend(frameon=False, loc="lower left")
    return figure


def draw_regimes(regimes: Rows, subcritical: Rows) -> Figure:
    """The largest weight through the transition, and bias against fluctuation below it."""
    figure, (left, right) = new_figure(columns=2, size=(5.2, 4.0))
    for index, d in enumerate(_values(regimes, "d")):
        part = [row for row in regimes if row["d"] == d]
        ratios = [row["ratio"] for row in part]
        left.plot(ratios, [row["limit"] for row in part], color=COLOURS[index], linestyle=DASHES[index])
        _points(left, ratios, part, index, f"d = {d}, n = {part[0]['n']}")
    left.axvline(1.0, color=GREY, linewidth=0.8)
    left.set(xscale="log", xlabel="λ = β/β*", ylabel="E w_max", title="Through the transition; lines: Poisson limit")
    left.legend(frameon=False, loc="upper left")
    for index, d in enumerate(_values(subcritical, "d")):
        part = [row for row in subcritical if row["d"] == d]
        betas = [row["beta"] for row in part]
        for name, measured, predicted, place in (
            ("bias 1 − ⟨q, out⟩", "bias", "bias_exact", 2 * index),
            ("tangential deviation", "variance", "variance_predicted", 2 * index + 1),
        ):
            power = 0.5 if measured == "variance" else 1.0
            right.plot(betas, [row[predicted] ** power for row in part], color=COLOURS[place], linestyle=DASHES[place])
            points = [row[measured] ** power for row in part]
            right.plot(betas, points, MARKERS[place], color=COLOURS[place], label=f"{name}, d = {d}", markersize=5)
    right.set(xscale="log", yscale="log", xlabel="β", ylabel="distance of the output from the query")
    right.set_title("Below β*: points measured, lines predicted")
    right.set_ylim(bottom=4e-4)
    right.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def draw_local_exponent(rows: Rows) -> Figure:
    """The scale of uniform keys fits what is uniform at the query, and nothing else."""
    figure, panels = new_figure(columns=2, size=(5.2, 4.0))
    for axes, measured, error, title in (
        (panels[0], "at_uniform_scale", "uniform_error", "at β* of uniform keys, (n·C₅)^(1/2)"),
        (panels[1], "at_own_scale", "own_error", "at β* of the density's own local law"),
    ):
        for index, name in enumerate(_values(rows, "density")):
            part = [row for row in rows if row["density"] == name]
            # Densities that agree lie on top of each other: a small shift keeps each visible.
            lengths = [row["n"] * 1.08**index for row in part]
            points = [{"measured": row[measured], "standard_error": row[error]} for row in part]
            _points(axes, lengths, points, index, str(name), line=True)
        for limit, exponent in sorted({(row["limit"], row["exponent"]) for row in rows}):
            axes.axhline(limit, color=GREY, linewidth=0.9, linestyle=DASHES[2])
            axes.annotate(
                f"limit for κ = {exponent:g}",
                (lengths[0], limit),
                xytext=(20, 3 if exponent < 2 else -11),
                textcoords="offset points",
                color=GREY,
                fontsize=8,
            )
        axes.set(xscale="log", xlabel="n", ylabel="E w_max", title=title, ylim=(0, 0.8))
        ticks = _values(rows, "n")
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
    panels[0].legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return figure


def draw_dimension(rows: Rows) -> Figure:
    """Where the limit stops to describe a context of given length."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    dims = [row["d"] for row in rows]
    axes.plot(dims, [row["limit"] for row in rows], color=COLOURS[2], linestyle=DASHES[1], label="Poisson limit, n → ∞")
    label = f"integral at n = {rows[0]['n']}"
    axes.plot(dims, [row["at_n"] for row in rows], color=COLOURS[1], linestyle=DASHES[0], label=label)
    _points(axes, dims, rows, 0, "measured")
    axes.axhline(rows[0]["uniform_weight"], color=GREY, linewidth=0.9, linestyle=DASHES[2])
    axes.annotate("1/n", (dims[0], rows[0]["uniform_weight"]), xytext=(0, 3), textcoords="offset points", color=GREY)
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="E w_max at β = β*", ylim=(1e-6, 1))
    axes.set_xticks(dims, [str(d) for d in dims])
    axes.minorticks_off()
    axes.set_title("At a fixed n the limit holds for small d only")
    axes.legend(frameon=False, loc="upper right")
    return figure


def _points(axes: Axes, x: list[Any], rows: Rows, index: int, label: str, line: bool = False) -> None:
    axes.errorbar(
        x,
        [row["measured"] for row in rows],
        [2 * row["standard_error"] for row in rows],
        color=COLOURS[index],
        marker=MARKERS[index],
        markersize=5,
        capsize=2,
        label=label,
        linestyle=DASHES[index] if line else "none",
    )


def _values(rows: Rows, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
