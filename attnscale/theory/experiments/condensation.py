"""Condensation measured on Gaussian rows: the crossover, retrieval of a signal, and attention without d^(−1/2)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attnscale.attention import attention_with_stats
from attnscale.statistics import RowStats, StatsRequest, row_statistics
from attnscale.theory import condensation, families
from attnscale.theory.estimates import Estimate, deviation, mean, slope
from attnscale.theory.experiments import (
    GREY,
    Comparison,
    Experiment,
    Picture,
    Progress,
    Rows,
    collect,
    line_style,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIFFUSE = (0.25, 0.5, 0.75)
TEMPERATURES = (*DIFFUSE, 1.0, 1.5, 2.0)  # t = β/β_c
DOUBLED = sorted({*TEMPERATURES, *(2 * t for t in TEMPERATURES)})  # Σ w² = Z(2β)/Z(β)²
SIGNALS = [0.1 * step for step in range(4, 19)]  # scores of the signal key, in units of σ √(2 ln n)
REQUEST = StatsRequest(entropy=False)
CHUNK = 1 << 19  # scores held at once
SMALL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5, "color": GREY}


class Sizes(NamedTuple):
    """Sample sizes: lengths, rows of up to 4096 keys, rows of more keys, keys beside a signal, and whole attention."""

    lengths: list[int]
    rows: int
    long_rows: int
    signal_keys: int
    attention_keys: int
    batches: int

    def rows_of(self, n: int) -> int:
        """The number of rows at n keys."""
        return self.rows if n <= 2**12 else self.long_rows


QUICK = Sizes([2**power for power in range(8, 15, 2)], 1024, 512, 2**12, 1024, 24)
FULL = Sizes([2**power for power in range(8, 19, 2)], 2048, 256, 2**16, 4096, 48)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Measure E ln w_max, E w_max, E Σ w² and the spread of ln Z over n and t, a signal key, and unscaled scores."""
    sizes = QUICK if quick else FULL
    steps = [
        (f"crossover, n = {n}", "crossover", partial(_crossover, n, sizes.rows_of(n), seed))
        for seed, n in enumerate(sizes.lengths)
    ]
    steps.append(("retrieval", "retrieval", partial(_retrieval, sizes.signal_keys, sizes.long_rows)))
    steps.append(("attention without d^(−1/2)", "unscaled", partial(_unscaled, sizes.attention_keys, sizes.batches)))
    data = collect(steps, progress)
    crossover, retrieval, unscaled = data.values()
    poisson = data["poisson"] = _poisson_rows(sizes.rows)
    comparisons = [*_slopes(crossover), *_largest(crossover), *_of_limit(poisson)]
    return Experiment(
        "condensation",
        [*comparisons, *_of_signal(retrieval), *_of_dimension(unscaled)],
        data,
        {
            "crossover": Picture(crossover_figure, {"crossover": crossover}),
            "order": Picture(order_figure, {"crossover": crossover, "limits": _limits()}),
            "retrieval": Picture(retrieval_figure, {"retrieval": retrieval, "unscaled": unscaled}),
        },
        (Picture(draw_crossover, {"crossover": crossover}),),
    )


def _measure(n: int, rows: int, seed: int, betas: list[float]) -> list[RowStats]:
    """Statistics [rows] of the same Gaussian rows, for each β."""
    generator = torch.Generator().manual_seed(seed)
    # Filled in place: small results that outlive the large tensors of their chunk fragment the heap.
    lse, max_logit, w_max = (torch.empty(len(betas), rows, dtype=torch.float64, device="cpu") for _ in range(3))
    chunk = max(1, min(rows, CHUNK // n))
    for start in range(0, rows, chunk):
        scores = families.sample("gaussian", n, min(chunk, rows - start), generator)
        for place, beta in enumerate(betas):
            stats = row_statistics(scores, beta, request=REQUEST)
            for column, values in ((lse, stats.lse), (max_logit, stats.max_logit), (w_max, stats.w_max)):
                column[place, start : start + chunk] = values
    visible = torch.full((rows,), n, device="cpu")
    return [RowStats(visible, *columns) for columns in zip(lse, max_logit, w_max, strict=True)]


def _crossover(n: int, rows: int, seed: int) -> Rows:
    critical = condensation.critical_beta(n)
    stats = dict(zip(DOUBLED, _measure(n, rows, seed, [t * critical for t in DOUBLED]), strict=True))
    found = Rows()
    for t in TEMPERATURES:
        here, doubled = stats[t], stats[2 * t]
        squares = torch.exp(doubled.lse - 2 * here.lse)
        found.append(
            {
                "n": n,
                "t": t,
                "rows": rows,
                **_pair("mean_ln_w_max", condensation.mean_ln_w_max(n, t), mean(here.w_max.log())),
                **_pair("mean_w_max", condensation.mean_w_max(n, t), mean(here.w_max)),
                **_pair("sum_of_squares", condensation.participation_ratio(n, t * critical), mean(squares)),
                **_pair("spread", condensation.log_partition_spread(n, t * critical), deviation(here.lse)),
                "highest_bound": (here.lse - here.max_logit).max().item() / math.log(n),
            }
        )
    return found


def _poisson_rows(rows: int) -> Rows:
    """Rows drawn from the limit, scores −ln Γ_k at β = t; their w_max has a closed form."""
    found = Rows()
    for t in (2.0, 3.0, 4.0):
        arrivals = families.arrival_times(rows, 2048, torch.Generator().manual_seed(7))
        w_max = row_statistics(-arrivals.log(), t, request=REQUEST).w_max
        half = mean((w_max > 0.5).double())
        largest = _pair("mean_w_max", condensation.w_max_limit(t), mean(w_max))
        found.append({"t": t, **largest, **_pair("more_than_half", condensation.chance_of_more(0.5, t), half)})
    return found


def _limits() -> Rows:
    """The order parameters for n → ∞ over t."""
    return Rows(
        {
            "t": t,
            "mean_w_max": condensation.w_max_limit(t) if t > 1 else 0.0,
            "sum_of_squares": condensation.participation_limit(t),
            "spread": condensation.log_partition_spread_limit(t),
        }
        for t in (0.0, 1.0, *(1.02 + 0.02 * step for step in range(50)))
    )


def _retrieval(n: int, rows: int) -> Rows:
    """A signal key beside n − 1 noise keys. The statistics of both are merged, so the noise is measured once."""
    critical = condensation.critical_beta(n)
    temperatures = (0.5, 1.0, 2.0)
    noise = _measure(n - 1, rows, 100, [t * critical for t in temperatures])
    found = Rows()
    for t, stats in zip(temperatures, noise, strict=True):
        beta = t * critical
        for share in SIGNALS:
            m = share * critical
            alone = row_statistics(torch.full((rows, 1), m, dtype=torch.float64, device="cpu"), beta, request=REQUEST)
            weight = torch.exp(beta * m - stats.merge(alone).lse)
            wins = (m * beta > stats.max_logit).double()
            found.append(
                {
                    "n": n,
                    "t": t,
                    "m": m,
                    "share": share,
                    **_pair("weight", condensation.target_weight(n, beta, m), mean(weight)),
                    **_pair("wins", condensation.chance_of_signal(n, m), mean(wins)),
                    "threshold": condensation.retrieval_threshold(n, beta),
                    "winner": condensation.winner(n, beta, m),
                }
            )
    return found


def _unscaled(n: int, batches: int) -> Rows:
    """Attention at β = 1 with and without d^(−1/2): one query with |q|² = d and n Gaussian keys per batch."""
    found = Rows()
    for d in (4, 16, 64, 256):
        generator = torch.Generator().manual_seed(d)
        query = torch.randn(batches, 1, 1, d, generator=generator, dtype=torch.float64, device=generator.device)
        query *= math.sqrt(d) / query.norm(dim=-1, keepdim=True)
        key = torch.randn(batches, 1, n, d, generator=generator, dtype=torch.float64, device=generator.device)
        for scaled in (True, False):
            scale = 1 / math.sqrt(d) if scaled else 1.0
            stats = attention_with_stats(query, key, key, scale=scale, request=REQUEST).stats
            t = scale * math.sqrt(d) / condensation.critical_beta(n)
            measured = mean(stats.w_max)
            row = {"n": n, "d": d, "scaled": scaled, "t": t, "critical_d": condensation.critical_dimension(n)}
            found.append(row | _pair("mean_w_max", condensation.mean_w_max(n, t), measured))
    return found


def _pair(name: str, predicted: float, measured: Estimate) -> dict[str, float]:
    return {f"{name}_predicted": predicted, name: measured.value, f"{name}_error": measured.error}


def _line(quantity: str, parameters: str, row: dict[str, Any], name: str) -> Comparison:
    return Comparison(quantity, parameters, row[f"{name}_predicted"], row[name], row[f"{name}_error"])


def _slopes(rows: Rows) -> list[Comparison]:
    lines = []
    for t in DIFFUSE:
        chosen = rows.where(t=t)
        x = [math.log(n) for n in chosen.column("n")]
        exact = slope(x, chosen.column("mean_ln_w_max_predicted"))
        found = slope(x, chosen.column("mean_ln_w_max"), chosen.column("mean_ln_w_max_error"))
        where = f"t={t}, n={chosen[0]['n']}…{chosen[-1]['n']}, limit {condensation.w_max_exponent(t):.4g}"
        lines.append(Comparison("slope of E ln w_max in ln n", where, exact.value, *found))
    return lines


def _largest(rows: Rows) -> list[Comparison]:
    names = {"mean_w_max": "E w_max", "sum_of_squares": "E Σ w²", "spread": "std ln Z"}
    n = max(rows.column("n"))
    return [_line(text, f"t={row['t']}, n={n}", row, name) for name, text in names.items() for row in rows.where(n=n)]


def _of_limit(rows: Rows) -> list[Comparison]:
    names = {"mean_w_max": "E w_max, Poisson rows", "more_than_half": "P(w_max > 1/2), Poisson rows"}
    return [_line(text, f"t={row['t']}", row, name) for name, text in names.items() for row in rows]


def _of_signal(rows: Rows) -> list[Comparison]:
    chosen = [row for row in rows if math.isclose(row["share"], 1.0)]
    where = f"m=σ√(2 ln n), n={chosen[0]['n']}"
    lines = [_line("E w_* of a signal", f"t={row['t']}, {where}", row, "weight") for row in chosen]
    return [*lines, _line("P(signal is largest)", where, chosen[0], "wins")]


def _of_dimension(rows: Rows) -> list[Comparison]:
    lines = []
    for row in rows:
        if row["d"] in (16, 256):
            quantity = f"E w_max {'with' if row['scaled'] else 'without'} d^(−1/2)"
            lines.append(_line(quantity, f"d={row['d']}, n={row['n']}", row, "mean_w_max"))
    return lines


def crossover_figure(rows: Rows) -> Figure:
    """E ln w_max against n."""
    figure, (axes,) = new_figure(size=(6.4, 4.4))
    draw_crossover(axes, rows)
    return figure


def draw_crossover(axes: Axes, rows: Rows) -> None:
    """Typical w_max against n, one series per t: measured, exact at finite n, and the limit of the slope."""
    for place, t, chosen in rows.series("t"):
        n, colour = chosen.column("n"), line_style(place)["color"]
        exact, measured = (
            [math.exp(value) for value in chosen.column(name)] for name in ("mean_ln_w_max_predicted", "mean_ln_w_max")
        )
        axes.plot(n, exact, color=colour, linewidth=1.3)
        axes.plot(n, measured, line_style(place)["marker"], color=colour, markersize=5.5)
        shift = {2.0: 0, 1.5: -7}.get(t, -3)  # these two would touch
        axes.annotate(f"t = {t:g}", (n[-1], measured[-1]), xytext=(7, shift), textcoords="offset points", fontsize=8.5)
        if t < 1:
            power = [exact[0] * (x / n[0]) ** condensation.w_max_exponent(t) for x in n]
            axes.plot(n, power, color=colour, linewidth=1, linestyle=(0, (1, 2)))
    axes.set(xscale="log", yscale="log", xlabel="keys n", ylabel="largest weight, exp E ln w_max")
    axes.set_xscale("log", base=2)
    axes.set_xlim(right=2.0 ** (math.log2(max(rows.column("n"))) + 1.6))
    axes.set_title("Condensation at β = t·√(2 ln n)/σ", loc="left", fontsize=10)
    for label, look in (("measured", "ok"), ("exact at n", "-k"), ("slope −(1−t)²", ":k")):
        axes.plot([], [], look, markersize=5, linewidth=1.2, label=label)
    axes.legend(loc="lower left", frameon=False, fontsize=8.5)


def order_figure(rows: Rows, limits: Rows) -> Figure:
    """E w_max, E Σ w² and the spread of ln Z against t, with their limits."""
    figure, panels = new_figure(columns=3, size=(4.2, 3.7))
    columns = {"mean_w_max": "E w_max", "sum_of_squares": "E Σ w²", "spread": "standard deviation of ln Z, nats"}
    lengths = rows.distinct("n")
    for axes, (name, label) in zip(panels, columns.items(), strict=True):
        for place, n in enumerate((lengths[0], lengths[len(lengths) // 2], lengths[-1]), start=1):
            chosen = rows.where(n=n)
            chosen.line(axes, "t", f"{name}_predicted", place, linestyle="solid", linewidth=1)
            chosen.error_bars(axes, "t", place, name, f"{name}_error", label=f"n = {n}")
        limits.line(axes, "t", name, 0, linestyle=(0, (5, 2)), label="n → ∞")
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        axes.set(xlabel="t = β/β_c", ylabel=label)
        axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    end = 1.1 / condensation.critical_beta(lengths[-1])
    panels[2].plot([0, end], [0, 1.1], color=GREY, linewidth=1)
    panels[2].annotate(f"bound βσ, n = {lengths[-1]}", (end, 1.1), xytext=(4, -4), **SMALL)
    panels[0].set_title("markers: measured ± 2 standard errors; thin lines: exact", loc="left", fontsize=10)
    return figure


def retrieval_figure(retrieval: Rows, unscaled: Rows) -> Figure:
    """The weight of a signal key against its score, its chance to win, and w_max with and without d^(−1/2)."""
    figure, (weight, wins, dimension) = new_figure(columns=3, size=(4.2, 3.7))
    for place, t, chosen in retrieval.series("t"):
        threshold = chosen[0]["threshold"] / condensation.critical_beta(chosen[0]["n"])
        chosen.line(weight, "share", "weight_predicted", place + 1, linestyle="solid", linewidth=1.2)
        chosen.points(weight, "share", "weight", place + 1, label=f"t = {t:g}")
        style = line_style(place + 1)
        weight.plot([threshold], [1.06], marker=style["marker"], color="white", markeredgecolor=style["color"])
    weight.set(ylabel="E weight of the signal key", ylim=(-0.03, 1.12), xlabel="score of the signal, m/(σ√(2 ln n))")
    weight.legend(loc="center left", frameon=False, fontsize=8.5)
    weight.set_title("open markers: threshold of each t", loc="left", fontsize=10)
    chosen.line(wins, "share", "wins_predicted", 0, linewidth=1.2, label="Φ(m/σ)ⁿ⁻¹")
    chosen.points(wins, "share", "wins", 0, label="measured")
    wins.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    wins.annotate("m = σ√(2 ln n)", (1, 0.3), xytext=(5, 0), **SMALL)
    wins.set(ylabel="P(signal has the largest score)", xlabel="score of the signal, m/(σ√(2 ln n))")
    wins.legend(loc="upper left", frameon=False, fontsize=8.5)
    wins.set_title(f"n = {chosen[0]['n']}", loc="left", fontsize=10)
    for place, scaled, chosen in unscaled.series("scaled"):
        chosen.line(dimension, "d", "mean_w_max_predicted", place + 1, linestyle="solid", linewidth=1.2)
        label = "q·k/√d" if scaled else "q·k"
        chosen.error_bars(dimension, "d", place + 1, "mean_w_max", "mean_w_max_error", label=label)
    critical = unscaled[0]["critical_d"]
    dimension.axvline(critical, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    dimension.annotate("d = 2 ln n", (critical, 0.9), xytext=(5, 0), **SMALL)
    dimension.set(xlabel="head dimension d", ylabel="E w_max at β = 1", ylim=(-0.03, 1.03))
    dimension.set_xscale("log", base=2)
    dimension.legend(loc="center right", frameon=False, fontsize=8.5)
    dimension.set_title(f"n = {unscaled[0]['n']}, |q|² = d", loc="left", fontsize=10)
    return figure
