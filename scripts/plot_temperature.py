"""Draw the README's picture: what five temperature laws do to the same attention stack as its context grows.

make figures        writes .github/assets/temperature.png and the numbers in temperature.csv beside it
"""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from attnscale.demo import LAWS, Measurement, measure

ASSETS = Path(__file__).resolve().parent.parent / ".github" / "assets"
LENGTHS = tuple(2**exponent for exponent in range(5, 14))
LABELS = {"constant": "β = 1", "sqrt_log": "√ln n", "log": "ln n", "log_squared": "(ln n)²", "power": "√n"}
COLOURS = {"constant": "#6b7280", "sqrt_log": "#2563eb", "log": "#059669", "log_squared": "#d97706", "power": "#dc2626"}


def main() -> None:
    """Measure, write the numbers, draw."""
    results = measure(LENGTHS)
    with (ASSETS / "temperature.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Measurement._fields)
        writer.writerows([cell.policy, cell.length, *(f"{value:.6f}" for value in cell[2:])] for cell in results)
    draw(results, ASSETS / "temperature.png")


def draw(results: list[Measurement], path: Path) -> None:
    """Largest weight and normalised entropy against length, a line per law, named at its end."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.7), layout="constrained")
    for law in LAWS:
        cells = [cell for cell in results if cell.policy == law]
        lengths = [cell.length for cell in cells]
        w_max = [cell.w_max for cell in cells]
        entropy = [cell.entropy / math.log(cell.length) for cell in cells]
        for axes, values in ((left, w_max), (right, entropy)):
            axes.plot(lengths, values, color=COLOURS[law], linewidth=2, marker="o", markersize=3.5)
    for axes, column in ((left, "w_max"), (right, "entropy")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(LENGTHS[::2], [f"{length}" for length in LENGTHS[::2]])
        axes.set_xlim(LENGTHS[0] * 0.85, LENGTHS[-1] * 3.4)
        axes.set_ylim(-0.05, 1.08)
        axes.set_xlabel("keys a query sees, n")
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        _name_lines(axes, results, column)
    left.set_title("largest attention weight", loc="left", fontsize=11)
    right.set_title("entropy / ln n   (1: uniform, 0: one key)", loc="left", fontsize=11)
    figure.savefig(path, dpi=160)


def _name_lines(axes: plt.Axes, results: list[Measurement], column: str) -> None:
    """Write each law's name behind its last point, moved apart where two would overlap."""
    ends = []
    for law in LAWS:
        cell = [cell for cell in results if cell.policy == law][-1]
        value = cell.w_max if column == "w_max" else cell.entropy / math.log(cell.length)
        ends.append([max(0.02, value), law])
    ends.sort()
    for below, above in itertools.pairwise(ends):
        above[0] = max(above[0], below[0] + 0.075)
    for value, law in ends:
        axes.text(LENGTHS[-1] * 1.2, value, LABELS[law], color=COLOURS[law], va="center", fontweight="bold")


if __name__ == "__main__":
    main()
