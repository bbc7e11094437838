"""The experiments on simplex, phases and sphere at tiny sizes: predictions hold, and every figure can be drawn."""

from __future__ import annotations

import pytest

from attnscale.theory import experiments
from attnscale.theory.experiments import phase, sphere

pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "QUICK", phase.Sizes(24, 3, 1, (4, 8, 32), 4, 2**8, 50))
    monkeypatch.setattr(sphere, "QUICK", sphere.Sizes(512, 24, 200, 2, (2**6, 2**7, 2**8)))


@pytest.mark.parametrize("name", ["simplex", "phase", "sphere"])
def test_an_experiment_compares_and_draws(name: str) -> None:
    steps: list[tuple[int, int, str]] = []
    found = experiments.run(name, quick=True, progress=lambda *step: steps.append(step))
    assert steps[-1][0] == steps[-1][1]
    exact = [line for line in found.comparisons if line.standard_error is None and line.kind == "exact"]
    assert {line.agreement for line in exact} <= {"equal"}
    assert {line.agreement for line in found.comparisons if line.kind == "bound"} <= {"yes"}
    assert all(rows for rows in found.data.values())
    for draw in found.figures.values():
        assert all(axes.get_xlabel() for axes in draw().axes if axes.get_label() != "<colorbar>")
