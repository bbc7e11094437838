"""Draw .github/assets/perplexity.csv: perplexity against β = 1, by context, a line per policy and RoPE.

python scripts/plot_perplexity.py        writes .github/assets/perplexity.png
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from attnscale.bench.perplexity import Row, read_table

ASSETS = Path(__file__).resolve().parent.parent / ".github" / "assets"
TRAINED = 8192
COLOURS = ("#6b7280", "#059669", "#2563eb", "#7c3aed", "#dc2626", "#d97706", "#0891b2", "#be185d", "#4d7c0f")


def main() -> None:
    """Read the table, draw it."""
    draw(read_table(ASSETS / "perplexity.csv"), ASSETS / "perplexity.png")


def draw(rows: list[Row], path: Path) -> None:
    """One axis, lengths doubling; the training length as an upright line."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(figsize=(8.4, 4.2), layout="constrained")
    lines = itertools.groupby(rows, key=lambda row: (row.policy, row.parameters, row.rope))
    for colour, (_, group) in zip(itertools.cycle(COLOURS), lines, strict=False):
        cells = list(group)
        contexts, ratios = [row.context for row in cells], [row.ratio_to_constant for row in cells]
        axes.plot(contexts, ratios, color=colour, linewidth=2, marker="o", markersize=4, label=label(cells[0]))
    axes.axvline(TRAINED, color="#9ca3af", linewidth=1, linestyle="--")
    contexts = sorted({row.context for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_xlabel("context in tokens; trained to the dashed line")
    axes.set_title("perplexity of SmolLM2-135M on enwik8, relative to β = 1", loc="left", fontsize=11)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def label(row: Row) -> str:
    """A setting in a few words, such as "log, L = 8192, floor, yarn"."""
    given = json.loads(row.parameters)
    parts = [row.policy]
    parts += [f"L = {given['reference_length']}"] if "reference_length" in given else []
    parts += ["floor"] if given.get("floor") else []
    parts += [row.rope] if row.rope != "own" else []
    return ", ".join(parts)


if __name__ == "__main__":
    main()
