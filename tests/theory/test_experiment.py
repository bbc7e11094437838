"""What an experiment hands over, its files, and the command that runs it."""

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
from attnscale.theory.experiments import Comparison, Experiment, Progress, Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def toy(quick: bool, progress: Progress | None = None) -> Experiment:
    """An experiment of one comparison, one table and one figure."""
    rows = [{"x": 1, "y": 0.25}, {"x": 2, "y": 1 / 3, "note": "b"}]

    def panel(axes: Axes) -> None:
        axes.plot([row["x"] for row in rows], [row["y"] for row in rows])

    def figure() -> Figure:
        drawn, (axes,) = experiments.new_figure()
        panel(axes)
        return drawn

    if progress is not None:
        progress(1, 1, "toy")
    lines = [Comparison("slope", f"quick={quick}", -0.5, -0.49, 0.02), Comparison("zero", "", 0.0, 1e-3)]
    return Experiment("toy", lines, {"points": Rows(rows)}, {"curve": figure}, (panel,))


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
    names = ["toy_comparisons.csv", "toy_points.csv", "toy_curve.png", "toy_curve.svg"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in written[0].parent.iterdir()) == sorted(names)
    with written[0].open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["predicted"], first["standard_error"] == ("-0.5", "0.02")
    assert second["standard_error"] == ""
    assert written[1].read_text() == "x,y,note\n1,0.25,\n2,0.333333,b\n"
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_the_same_figure_gives_the_same_bytes() -> None:
    draw = toy(quick=True).figures["curve"]
    assert experiments.render(draw()) == experiments.render(draw())


def test_a_figure_that_cannot_be_drawn_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> Figure:
        raise ZeroDivisionError

    broken = toy(quick=True)._replace(figures={"good": toy(quick=True).figures["curve"], "bad": fail})
    with pytest.raises(ZeroDivisionError):
        experiments.write(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_series_differ_by_more_than_colour() -> None:
    styles = [experiments.line_style(index) for index in range(9)]
    assert len({style["marker"] for style in styles}) == 9
    assert len({style["color"] for style in styles[:8]}) == 8


@pytest.mark.usefixtures("_toys")
def test_the_command_prints_the_table_and_says_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["theory", "gaps", "--quick", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "quick=True" in printed
    header = next(line for line in printed.splitlines() if "predicted" in line)
    assert header.split() == [
        "quantity",
        "parameters",
        "predicted",
        "measured",
        "standard",
        "error",
        "relative",
        "error",
    ]
    assert f"wrote 4 files into {tmp_path}" in printed


@pytest.mark.usefixtures("_toys")
def test_all_runs_every_experiment_and_draws_the_strip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "all", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in experiments.NAMES)
    assert (tmp_path / "strip.png").is_file()
    assert (tmp_path / "strip.svg").is_file()


def test_an_unknown_experiment_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["theory", "alchemy"])
    assert "invalid choice: 'alchemy'" in capsys.readouterr().err
