"""Coverage of the intervals of `fit_growth` on heads whose law of Λ is known.

python -m scripts.calibration coverage --output .github/assets

Each run draws the scores of 64 sequences at five lengths from 1× to 4× and fits both forms. The scores of a row have a
random scale, in part common to its sequence, so that rows are neither equal nor independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from attnscale._util.files import write_table
from attnscale.lab.calibration.growth import FormName, Growth, fit_growth
from attnscale.lab.calibration.measuring import grid
from attnscale.statistics.gaps import accumulation_scales

MIN_RANK = 8
SEQUENCE_SPREAD, ROW_SPREAD = 0.1, 0.2  # standard deviations of the log of the scale

COLUMNS = ("law", "form", "exponent", "runs", "inside", "mean_estimate", "median_width", "widest", "power_preferred")


class SyntheticLaw(NamedTuple):
    """Scores [rows, n] of a head, the form of Λ and its exponent; None if it has to be measured on a large sample."""

    scores: Callable[[int, int, Generator], Tensor]
    form: FormName
    exponent: float | None


def _gaussian(rows: int, n: int, generator: Generator) -> Tensor:
    return torch.randn(rows, n, generator=generator, dtype=torch.float64, device="cpu")


def _at_gap(gap: Callable[[int], float]) -> Callable[[int, int, Generator], Tensor]:
    """Return scores with all keys but the best at one gap."""

    def scores(rows: int, n: int, generator: Generator) -> Tensor:
        found = torch.full((rows, n), -gap(n), dtype=torch.float64, device="cpu")
        found[:, 0] = 0.0
        return found

    return scores


# Simplex: Λ = ln n/(1 − ρ). Cluster: Λ = (ln n)². Power: Λ = n^¼. Gaussian: Λ tends to √(2 ln n)/σ, slowly.
LAWS = {
    "gaussian": SyntheticLaw(_gaussian, "log", None),
    "simplex": SyntheticLaw(_at_gap(lambda n: 0.5), "log", 1.0),
    "cluster": SyntheticLaw(_at_gap(lambda n: 1 / math.log(n)), "log", 2.0),
    "power": SyntheticLaw(_at_gap(lambda n: math.log(n) / n**0.25), "power", 0.25),
}


@dataclass(frozen=True)
class Coverage:
    """The size of the experiment.

    Args:
        runs: Number of fits per law.
        sequences: Sequences per length.
        rows: Rows per sequence.
        draws: Bootstrap resamples of a fit.
        lengths: The measured lengths.
    """

    runs: int = 100
    sequences: int = 64
    rows: int = 8
    draws: int = 500
    lengths: tuple[int, ...] = grid(128, 512)


def run(experiment: Coverage, output: Path) -> Path:
    """Write the table of all laws."""
    target = output / "calibration_coverage.csv"
    output.mkdir(parents=True, exist_ok=True)
    write_table(target, COLUMNS, [measure(experiment, name) for name in LAWS])
    return target


def measure(experiment: Coverage, name: str) -> dict[str, object]:
    """Return the row of one law: in how many runs the exponent is within its 95 % interval, and the widths."""
    law = LAWS[name]
    truth = _measured_exponent(experiment, law) if law.exponent is None else law.exponent
    fits = list(_fits(experiment, law))
    ends = [fit.exponent(law.form) for fit in fits]
    widths = sorted(high - low for _, low, high in ends)
    return {
        "law": name,
        "form": law.form,
        "exponent": truth,
        "runs": len(fits),
        "inside": sum(low <= truth <= high for _, low, high in ends),
        "mean_estimate": sum(value for value, _, _ in ends) / len(ends),
        "median_width": widths[len(widths) // 2],
        "widest": widths[-1],
        "power_preferred": sum(fit.power_share > 0.5 for fit in fits) / len(fits),
    }


def _fits(experiment: Coverage, law: SyntheticLaw) -> Iterator[Growth]:
    for seed in range(experiment.runs):
        generator = Generator().manual_seed(seed)
        values = {
            n: list(_scales(law, n, experiment.sequences, experiment.rows, generator)) for n in experiment.lengths
        }
        yield fit_growth(values, draws=experiment.draws, seed=seed)


def _scales(law: SyntheticLaw, n: int, sequences: int, rows: int, generator: Generator) -> Tensor:
    """Return Λ [sequences, rows]."""
    scores = law.scores(sequences * rows, n, generator).view(sequences, rows, n)
    drawn = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    common = SEQUENCE_SPREAD * torch.randn(sequences, 1, 1, **drawn)  # type: ignore[call-overload]
    own = ROW_SPREAD * torch.randn(sequences, rows, 1, **drawn)  # type: ignore[call-overload]
    (found,) = accumulation_scales(scores * (common + own).exp(), (MIN_RANK,))
    return found


def _measured_exponent(experiment: Coverage, law: SyntheticLaw) -> float:
    """Return the exponent of the form fitted to medians over 16 × 1600 sequences per length."""
    generator = Generator().manual_seed(2**31)
    rows = experiment.rows
    values = {n: [_scales(law, n, 1600, rows, generator).flatten() for _ in range(16)] for n in experiment.lengths}
    return fit_growth(values, draws=2).exponent(law.form)[0]
