"""Figures of the experiment on the sphere, each drawn from its table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscale.theory.drawing import COLOURS, DASHES, GREY, MARKERS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]


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
