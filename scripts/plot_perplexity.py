"""Draw .github/assets/perplexity.csv: perplexity over that of β = 1, by context, a line per policy.

python scripts/plot_perplexity.py        writes .github/assets/perplexity.png
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from attnscale.bench.perplexity import Row, read_table

ASSETS = Path(__file__).resolve().parent.parent / ".github" / "assets"
TRAINED = 8192
COLOURS = ("#6b7280", "#059669", "#2563eb", "#7c3aed", "#dc2626", "#d97706", "#0891b2", "#be185d", "#4d7c0f")


def main() -> None:
    """Read the table, draw it."""
    draw(read_table(ASSETS / "perplexity.csv"), ASSETS / "perplexity.png")


def draw(rows: list[Row], path: Path) -> None:
    """Two axes, lengths doubling: the model's own rotary embedding, and YaRN's; the training length is upright."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, pair = plt.subplots(1, 2, figsize=(10.4, 3.9), layout="constrained", sharey=True)
    panel(pair[0], [row for row in rows if row.rope == "own"], "its own RoPE")
    panel(pair[1], [row for row in rows if row.rope != "own"], "RoPE stretched twice (YaRN)")
    pair[0].set_ylabel("perplexity over that of β = 1")
    figure.suptitle("SmolLM2-135M on enwik8, one window of text", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=160)


def panel(axes: Axes, rows: list[Row], title: str) -> None:
    """A line per policy, over the first setting of the panel, which is β = 1."""
    settings = [list(group) for _, group in itertools.groupby(rows, key=lambda r: (r.policy, r.parameters, r.rope))]
    base = {row.context: row.perplexity for row in settings[0]}
    for colour, cells in zip(itertools.cycle(COLOURS), settings, strict=False):
        contexts, ratios = [row.context for row in cells], [row.perplexity / base[row.context] for row in cells]
        axes.plot(contexts, ratios, color=colour, linewidth=2, marker="o", markersize=4, label=label(cells[0]))
    axes.axvline(TRAINED, color="#9ca3af", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(base), [str(context) for context in sorted(base)])
    axes.set_xlabel("context in tokens; trained to the dashed line")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.legend(frameon=False, fontsize=9)


def label(row: Row) -> str:
    """A setting in a few words, such as "log, L = 8192, floor"."""
    given = json.loads(row.parameters)
    parts = [row.policy]
    parts += [f"L = {given['reference_length']}"] if "reference_length" in given else []
    parts += ["floor"] if given.get("floor") else []
    parts += ["with YaRN's own factor"] if row.rope == "yarn" else []
    return ", ".join(parts)


if __name__ == "__main__":
    main()
