"""The result of an experiment, its files, and the command that runs it."""

from __future__ import annotations

import csv
import importlib
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnscale.cli import main
from attnscale.theory import experiments
from attnscale.theory.experiments import Comparison, Experiment, Picture, Progress, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def toy(quick: bool, progress: Progress | None = None) -> Experiment:
    """An experiment of one comparison, one table and one figure."""
    rows = Rows([{"x": 1, "y": 0.25}, {"x": 2, "y": 1 / 3, "note": "b"}])

    def panel(axes: Axes, points: Rows) -> None:
        points.line(axes, "x", "y", 0)

    def figure(points: Rows) -> Figure:
        drawn, (axes,) = experiments.new_figure()
        panel(axes, points)
        return drawn

    if progress is not None:
        progress(1, 1, "toy")
    lines = [Comparison("slope", f"quick={quick}", -0.5, -0.49, 0.02), Comparison("zero", "", 0.0, 1e-3)]
    figures = {"curve": Picture(figure, {"points": rows})}
    return Experiment("toy", lines, {"other": Rows([{"x": 3}])}, figures, (Picture(panel, {"points": rows}),))


@pytest.fixture
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experiments are toys."""
    for name in experiments.NAMES:
        module = types.SimpleNamespace(run=toy)
        monkeypatch.setitem(sys.modules, f"attnscale.theory.experiments.{name}", module)


def test_every_module_of_the_folder_is_an_experiment() -> None:
    folder = Path(experiments.__file__).parent
    assert set(experiments.NAMES) == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    for name in experiments.NAMES:
        assert callable(importlib.import_module(f"attnscale.theory.experiments.{name}").run)


def test_errors_are_relative_to_the_prediction_and_absolute_where_it_is_zero() -> None:
    first, second = toy(quick=True).comparisons
    assert first.relative_error == pytest.approx(0.02)
    assert second.relative_error == 1e-3


def test_an_experiment_becomes_tables_and_pictures(tmp_path: Path) -> None:
    written = experiments.write(toy(quick=True), tmp_path / "new" / "folder")
    names = ["toy_comparisons.csv", "toy_other.csv", "toy_curve.csv", "toy_curve.png", "toy_curve.svg"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    with written[0].open(newline="") as file:
        first, second = csv.DictReader(file)
    kept = ("predicted", "standard_error", "kind", "agree")
    assert [first[name] for name in kept] == ["-0.5", "0.02", "exact", "yes"]
    assert [second[name] for name in ("standard_error", "agree")] == ["", "no"]
    assert written[2].read_text() == "x,y,note\n1,0.25,\n2,0.333333,b\n"
    assert written[3].read_bytes().startswith(b"\x89PNG")


def test_the_same_figure_gives_the_same_bytes() -> None:
    draw = toy(quick=True).figures["curve"]
    assert experiments.render(draw()) == experiments.render(draw())


def test_a_figure_that_cannot_be_drawn_leaves_no_file(tmp_path: Path) -> None:
    def fail(rows: Rows) -> Figure:
        raise ZeroDivisionError

    good = toy(quick=True).figures["curve"]
    broken = toy(quick=True)._replace(figures={"good": good, "bad": good._replace(draw=fail)})
    with pytest.raises(ZeroDivisionError):
        experiments.write(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_series_differ_by_more_than_colour() -> None:
    styles = [experiments.line_style(index) for index in range(9)]
    assert len({style["marker"] for style in styles}) == 9
    assert len({style["color"] for style in styles[:8]}) == 8


@pytest.mark.usefixtures("_toys")
def test_the_command_prints_the_table_and_the_number_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["theory", "gaps", "--quick", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "quick=True" in printed
    header = next(line for line in printed.splitlines() if "predicted" in line)
    columns = ["quantity,", "parameters", "predicted", "measured", "s.e.", "relative", "kind", "agree"]
    assert header.split() == columns
    assert "wrote 5 files" in printed


@pytest.mark.usefixtures("_toys")
def test_all_runs_every_experiment_and_draws_the_strip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "all", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in experiments.NAMES)
    pictures = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert "strip" in pictures
    assert pictures == sorted(path.stem for path in tmp_path.glob("*.svg"))
    assert set(pictures) < {path.stem for path in tmp_path.glob("*.csv")}
    with (tmp_path / "strip.csv").open(newline="") as file:
        panels = [int(row["panel"]) for row in csv.DictReader(file)]
    assert panels == sorted(panels)
    assert len(panels) == 2 * len(experiments.NAMES)


def test_an_unknown_experiment_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["theory", "alchemy"])
    assert "invalid choice: 'alchemy'" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / ".github" / "assets"


def committed(name: str) -> list[dict[str, str]]:
    with (ASSETS / f"theory_{name}_comparisons.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_committed_picture_has_its_data() -> None:
    pictures = {path.stem for path in ASSETS.glob("theory_*.png")}
    assert pictures
    assert pictures <= {path.stem for path in ASSETS.glob("theory_*.csv")}


@pytest.mark.parametrize("name", experiments.NAMES)
def test_no_exact_prediction_and_no_bound_fails_in_the_committed_tables(name: str) -> None:
    rows = committed(name)
    assert {row["agree"] for row in rows if row["kind"] != "limit"} <= {"yes", "equal"}
    assert {row["agree"] for row in rows if row["kind"] == "limit"} <= {"yes", "no", "-"}


def test_the_table_of_the_readme_is_a_selection_of_the_committed_tables() -> None:
    text = (ROOT / "attnscale" / "theory" / "README.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    shown = [row for row in cells if len(row) == 7 and row[0] in experiments.NAMES]
    assert {row[0] for row in shown} == set(experiments.NAMES)
    for name, *row in shown:
        known = []
        for line in committed(name):
            error = f" ± {float(line['standard_error']):.2g}" if line["standard_error"] else ""
            numbers = (f"{float(line['predicted']):.5g}", f"{float(line['measured']):.5g}{error}")
            known.append([line["quantity"], line["parameters"], *numbers, line["kind"], line["agree"]])
        assert row in known
    disagree = sum(row["agree"] == "no" for name in experiments.NAMES for row in committed(name))
    assert disagree == 5, "the README states this number"
