"""The picture of an experiment: accuracy against the number of keys, a line per policy."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from attnscale._util.files import write_whole
from attnscale._util.optional import need


class Style(NamedTuple):
    """Colour, marker and dashes: any one of them tells a line from the others."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]


# The colours of Okabe and Ito, with grey in place of yellow, which is hard to see on white.
STYLES = (
    Style("#000000", "o", "solid"),
    Style("#56b4e9", "s", (0, (5, 1))),
    Style("#0072b2", "^", "solid"),
    Style("#009e73", "D", (0, (3, 1, 1, 1))),
    Style("#cc79a7", "P", (0, (8, 2))),
    Style("#e69f00", "X", "solid"),
    Style("#d55e00", "v", (0, (5, 1))),
    Style("#999999", "*", (0, (1, 1))),
)


def needed_to_draw() -> ModuleType:
    """The module of matplotlib that draws without a display, or an error that names the extra."""
    module: ModuleType = need("matplotlib.figure", "the picture of an experiment", "report")
    return module


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the mean; a single value has no known error and gets 0.

    >>> mean_and_error([0.25, 0.5, 0.75])
    (0.5, 0.1443...)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def draw(
    curves: Mapping[str, Mapping[int, Sequence[float]]], trained: int, chance: float, title: str, path: Path
) -> None:
    """Write a PNG. `curves` has, by policy and length, an accuracy per seed; `chance` is what guessing gives."""
    figure = needed_to_draw().Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(trained, color="#9ca3af", linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(chance, color="#9ca3af", linewidth=1, linestyle=(0, (1, 2)))
    axes.text(trained, chance, "  guessing", color="#6b7280", va="bottom", fontsize=9)
    lengths = sorted({length for curve in curves.values() for length in curve})
    seeds = max(len(values) for curve in curves.values() for values in curve.values())
    for number, (policy, curve) in enumerate(curves.items()):
        style = STYLES[number % len(STYLES)]
        x = sorted(curve)
        points = [mean_and_error(curve[length]) for length in x]
        low, high = ([mean + sign * error for mean, error in points] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)
        means = [mean for mean, _ in points]
        axes.plot(
            x,
            means,
            color=style.colour,
            marker=style.marker,
            linestyle=style.dashes,
            markersize=5.5,
            label=policy,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"])
    axes.set_xlabel(f"items n; trained up to {trained}, the dashed line")
    axes.set_title(f"{title}: right answers, mean of {seeds} seeds ± 1 standard error", loc="left", fontsize=11)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, handlelength=4)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=160)
    write_whole(path, picture.getvalue())
