"""Condensation measured on Gaussian rows: the crossover, retrieval of a signal, and attention without d^(−1/2)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch

from attnscale.attention import attention_with_stats
from attnscale.statistics import RowStats, StatsRequest, row_statistics
from attnscale.theory import condensation, families, poisson_dirichlet
from attnscale.theory.estimates import Estimate, mean, slope, spread
from attnscale.theory.experiment import Comparison, Experiment, Progress
from attnscale.theory.figures import condensation as figures

Rows = list[dict[str, Any]]

DIFFUSE = (0.25, 0.5, 0.75)
TEMPERATURES = (*DIFFUSE, 1.0, 1.5, 2.0)  # t = β/β_c
DOUBLED = sorted({*TEMPERATURES, *(2 * t for t in TEMPERATURES)})  # Σ w² = Z(2β)/Z(β)²
SIGNALS = [0.1 * step for step in range(4, 19)]  # scores of the signal key, in units of σ √(2 ln n)
REQUEST = StatsRequest(entropy=False)
CHUNK = 1 << 19  # scores held at once


class Sizes(NamedTuple):
    """How much is sampled: rows of up to 4096 keys and of more, and sizes of the signal and of whole attention."""

    lengths: list[int]
    rows: int
    long_rows: int
    signal_keys: int
    attention_keys: int
    batches: int


QUICK = Sizes([2**power for power in range(8, 15, 2)], 1024, 512, 2**12, 1024, 24)
FULL = Sizes([2**power for power in range(8, 19, 2)], 2048, 256, 2**16, 4096, 48)


def run(quick: bool, progress: Progress | None = None) -> Experiment:
    """Measure E ln w_max, E w_max, E Σ w² and the spread of ln Z over n and t, a signal key, and unscaled scores."""
    sizes = QUICK if quick else FULL
    total = len(sizes.lengths) + 2
    crossover: Rows = []
    for step, n in enumerate(sizes.lengths):
        _report(progress, step, total, f"crossover, n = {n}")
        crossover += _crossover(n, rows=sizes.rows if n <= 2**12 else sizes.long_rows, seed=step)
    _report(progress, total - 2, total, "retrieval")
    retrieval = _retrieval(sizes.signal_keys, sizes.long_rows)
    _report(progress, total - 1, total, "attention without d^(−1/2)")
    unscaled = _unscaled(sizes.attention_keys, sizes.batches)
    _report(progress, total, total, "done")
    poisson = _poisson_rows(sizes.rows)
    data = {"crossover": crossover, "retrieval": retrieval, "unscaled": unscaled, "poisson": poisson}
    comparisons = [*_slopes(crossover), *_largest(crossover), *_of_limit(poisson)]
    return Experiment(
        "condensation",
        [*comparisons, *_of_signal(retrieval), *_of_dimension(unscaled)],
        data,
        {
            "crossover": partial(figures.crossover_figure, crossover),
            "order": partial(figures.order_figure, crossover),
            "retrieval": partial(figures.retrieval_figure, retrieval, unscaled),
        },
        (partial(figures.draw_crossover, rows=crossover),),
    )


def _report(progress: Progress | None, done: int, total: int, label: str) -> None:
    if progress is not None:
        progress(done, total, label)


def _measure(n: int, rows: int, seed: int, betas: list[float]) -> list[RowStats]:
    """Statistics [rows] of the same Gaussian rows at each β."""
    generator = torch.Generator().manual_seed(seed)
    # Filled in place: small results that outlive the large ones of their chunk would fragment the heap to gigabytes.
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
    found = []
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
                **_pair("spread", condensation.log_partition_spread(n, t * critical), spread(here.lse)),
                "highest_bound": (here.lse - here.max_logit).max().item() / math.log(n),
            }
        )
    return found


def _poisson_rows(rows: int) -> Rows:
    """Rows of the limit itself, scores −ln Γ_k at β = t, for which the law of w_max has a closed form."""
    found = []
    for t in (2.0, 3.0, 4.0):
        generator = torch.Generator().manual_seed(7)
        arrivals = (
            torch.empty(rows, 2048, dtype=torch.float64, device="cpu").exponential_(generator=generator).cumsum(-1)
        )
        w_max = row_statistics(-arrivals.log(), t, request=REQUEST).w_max
        half = mean((w_max > 0.5).double())
        largest = _pair("mean_w_max", poisson_dirichlet.mean_largest(t), mean(w_max))
        found.append({"t": t, **largest, **_pair("more_than_half", poisson_dirichlet.chance_of_more(0.5, t), half)})
    return found


def _retrieval(n: int, rows: int) -> Rows:
    """A signal key beside n − 1 noise keys; their statistics are merged, so that the noise is measured once."""
    critical = condensation.critical_beta(n)
    temperatures = (0.5, 1.0, 2.0)
    noise = _measure(n - 1, rows, 100, [t * critical for t in temperatures])
    found = []
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
    """Attention at β = 1 with and without d^(−1/2), one query with |q|² = d and n Gaussian keys in each batch."""
    found = []
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
        chosen = [row for row in rows if row["t"] == t]
        x = [math.log(row["n"]) for row in chosen]
        exact = slope(x, [row["mean_ln_w_max_predicted"] for row in chosen])
        found = slope(x, [row["mean_ln_w_max"] for row in chosen], [row["mean_ln_w_max_error"] for row in chosen])
        where = f"t={t}, n={chosen[0]['n']}…{chosen[-1]['n']}, limit {condensation.w_max_exponent(t):.4g}"
        lines.append(Comparison("slope of E ln w_max in ln n", where, exact.value, *found))
    return lines


def _largest(rows: Rows) -> list[Comparison]:
    names = {"mean_w_max": "E w_max", "sum_of_squares": "E Σ w²", "spread": "std ln Z"}
    n = max(row["n"] for row in rows)
    chosen = [row for row in rows if row["n"] == n]
    return [_line(text, f"t={row['t']}, n={n}", row, name) for name, text in names.items() for row in chosen]


def _of_limit(rows: Rows) -> list[Comparison]:
    names = {"mean_w_max": "E w_max, Poisson rows", "more_than_half": "P(w_max > 1/2), Poisson rows"}
    return [_line(text, f"t={row['t']}", row, name) for name, text in names.items() for row in rows]


def _of_signal(rows: Rows) -> list[Comparison]:
    chosen = [row for row in rows if math.isclose(row["share"], 1.0)]
    where = "m=σ√(2 ln n), n={n}"
    lines = [_line("E w_* of a signal", f"t={row['t']}, {where.format(**row)}", row, "weight") for row in chosen]
    return [*lines, _line("P(signal is largest)", where.format(**chosen[0]), chosen[0], "wins")]


def _of_dimension(rows: Rows) -> list[Comparison]:
    chosen = [row for row in rows if row["d"] in (16, 256)]
    lines = []
    for row in chosen:
        quantity = f"E w_max {'with' if row['scaled'] else 'without'} d^(−1/2)"
        lines.append(_line(quantity, f"d={row['d']}, n={row['n']}", row, "mean_w_max"))
    return lines
