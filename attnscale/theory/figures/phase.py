"""Figures of the experiment on phases, each drawn from its table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnscale.theory.drawing import COLOURS, DASHES, GREY, MARKERS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
LABELS = {
    "angle_ratio": "λ: angle after / before one layer (Eq. 26)",
    "jacobian_norm": "η: ‖∇X'‖²/(nd) (Eq. 27)",
}


def draw_sweep(rows: Rows, column: str) -> Figure:
    """A panel per dimension over (ρ, γ) with the curve γ = 1/(1−ρ): figures 1 and 2 of seed 004."""
    dims = list(dict.fromkeys(row["d"] for row in rows))
    figure, panels = new_figure(columns=len(dims), size=(3.6, 3.5))
    for axes, d in zip(panels, dims, strict=True):
        mesh = _heat_map(axes, [row for row in rows if row["d"] == d], column)
        axes.set_title(f"d = {d}, n = {rows[0]['n']}")
        if axes is not panels[0]:
            axes.set_ylabel("")
    panels[0].legend(loc="upper left", fontsize=8, framealpha=0.9)
    figure.colorbar(mesh, ax=panels, label=LABELS[column], extend="max" if column == "jacobian_norm" else "neither")
    return figure


def draw_strip_panel(axes: Axes, rows: Rows) -> None:
    """The phase diagram of one dimension for the strip of the root README."""
    mesh = _heat_map(axes, rows, "angle_ratio")
    axes.set_title(f"Angle kept by one layer, d = {rows[0]['d']}", loc="left", fontsize=10)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9)
    axes.figure.colorbar(mesh, ax=axes, label="λ: angle after / before")


def draw_bounds(rows: Rows) -> Figure:
    """Measured values with the bounds of theorems 2.3 and 2.5 on either side."""
    figure, panels = new_figure(columns=3, size=(4.3, 3.8))
    gammas = [row["gamma"] for row in rows]
    curves: tuple[tuple[int, str, str, int], ...] = (
        (0, "cosine", "measured, α = 0", 0),
        (0, "cosine_bound", "lower bound, α = 0", 1),
        (0, "residual_cosine", f"measured, α = {rows[0]['alpha']:g}", 2),
        (0, "residual_cosine_bound", f"lower bound, α = {rows[0]['alpha']:g}", 3),
        (1, "moved", "measured", 0),
        (1, "moved_bound", "upper bound", 1),
        (2, "eta", "measured", 0),
        (2, "eta_upper", "upper bound", 1),
        (2, "eta_lower", "lower bound", 3),
    )
    for place, column, label, index in curves:
        points = [(gamma, row[column]) for gamma, row in zip(gammas, rows, strict=True) if row[column] > 0.0]
        style = {"color": COLOURS[index], "linestyle": DASHES[index], "marker": MARKERS[index], "markersize": 3.5}
        panels[place].plot(*zip(*points, strict=True), label=label, **style)
    for axes in panels:
        for edge in ("below", "above"):
            axes.axvline(rows[0][edge], color=GREY, linewidth=0.9, linestyle=DASHES[2])
        axes.set_xlabel("γ = β/ln n; dotted: 1/(1−ρ₁) and 1/(1−ρ₂)")
    panels[0].set(ylabel="smallest cosine after one layer", title="Contraction, Eq. 10", ylim=(0, 1.05))
    panels[1].set(ylabel="largest ‖ATT(y_i) − y_i‖", title="Identity, Eq. 11", yscale="log")
    panels[2].set(ylabel="η", title="Jacobian norm, Eqs. 22 and 23", yscale="log")
    panels[0].legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.95))
    panels[1].legend(frameon=False, fontsize=8, loc="lower left")
    panels[2].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def draw_middle_phase(rows: Rows) -> Figure:
    """Who gets the weight of a row as γ grows: all, the near ones, the token itself."""
    figure, (axes,) = new_figure(size=(5.6, 4.0))
    gammas = [row["gamma"] for row in rows]
    for index, (name, label) in enumerate(
        (("far", "far tokens"), ("near", "near tokens"), ("own", "the token itself"))
    ):
        exact = [row[f"{name}_exact"] for row in rows]
        axes.plot(gammas, exact, color=COLOURS[index], linestyle=DASHES[index])
        axes.plot(gammas, [row[name] for row in rows], MARKERS[index], color=COLOURS[index], markersize=5, label=label)
    for edge in ("near_above", "near_below"):
        axes.axvline(rows[0][edge], color=GREY, linewidth=0.9, linestyle=DASHES[2])
    axes.set(xlabel="γ = β/ln n; dotted: the edges of Lemma C.1", ylabel="share of the row's weight")
    axes.set_title(f"Groups of √n near tokens, n = {rows[0]['n']}; lines: closed form")
    axes.legend(frameon=False, loc="center right")
    return figure


def draw_spacings(rows: Rows) -> Figure:
    """Gaps and largest weight of Gaussian scores: what appendix D prints, and what is."""
    figure, panels = new_figure(columns=2, size=(4.9, 3.8))
    for axes, kind in zip(panels, ("gap", "weight"), strict=True):
        part = [row for row in rows if row["kind"] == kind]
        x = [row["x"] for row in part]
        axes.plot(x, [row["printed"] for row in part], color=COLOURS[2], linestyle=DASHES[1], label="as printed")
        axes.plot(x, [row["limit"] for row in part], color=COLOURS[1], linestyle=DASHES[0], label="limit, gaps E_k/k")
        axes.errorbar(
            x, [row["measured"] for row in part], [2 * row["standard_error"] for row in part],
            color=COLOURS[0], marker="o", markersize=5, linestyle="none", label=f"measured, n = {part[0]['n']}",
        )  # fmt: skip
    panels[0].set(xlabel="rank k", ylabel="t_n·E(a₁ − a_k)", title="Gaps of the largest scores, Eq. 117")
    panels[1].set(xlabel="t = β/√(2 ln n)", ylabel="E w_max", title="Largest weight, Eq. 118", ylim=(0, 1))
    panels[0].legend(frameon=False, loc="upper left")
    return figure


def _heat_map(axes: Axes, rows: Rows, column: str) -> Any:
    rhos, gammas = (sorted({row[name] for row in rows}) for name in ("rho", "gamma"))
    values = {(row["rho"], row["gamma"]): row[column] for row in rows}
    table = [[values[rho, gamma] for rho in rhos] for gamma in gammas]
    axes.grid(visible=False)
    mesh = axes.pcolormesh(rhos, gammas, table, cmap="cividis", vmin=0.0, vmax=1.0, shading="nearest")
    curve = [step / 100 for step in range(91)]
    critical = [1.0 / (1.0 - rho) for rho in curve]
    axes.plot(curve, critical, color="white", linewidth=3.0)
    axes.plot(curve, critical, color="black", linewidth=1.5, linestyle=DASHES[1], label="γ = 1/(1−ρ)")
    axes.set(xlabel="ρ", ylabel="γ = β/ln n", xlim=(min(rhos), max(rhos)), ylim=(min(gammas), max(gammas)))
    return mesh
