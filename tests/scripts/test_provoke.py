"""The monitor names what is done to real training runs, and is silent about one that is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnscale.diagnostics import Event
from scripts.provoke import tables
from scripts.provoke.__main__ import Outcome
from scripts.provoke.models import Gpt
from scripts.provoke.runs import Experiment, carry_out, nothing, provoked

SMALL = {"width": 32, "heads": 4}
# In so short a run the logits are still small: weights are scaled further than in `python -m scripts.provoke`.
RUNS = {one.name: one for one in provoked(start=30, steps=50, factor=1000.0, **SMALL)}
QUIET = Experiment("healthy", lambda: Gpt(**SMALL), nothing, steps=60)


def outcome(experiment: Experiment) -> Outcome:
    threads, events = torch.get_num_threads(), list[Event]()
    torch.set_num_threads(1)
    try:
        carry_out(experiment, 5, 5, on_alert=events.append)
    finally:
        torch.set_num_threads(threads)
    return Outcome(experiment, 5, events, 5)


# These need a model that has learned more than this one.
TRAINED = ("learning rate × 1000", "W_q of one layer × 0.001", "β = 50")


@pytest.mark.parametrize("name", [name for name in RUNS if name not in TRAINED])
def test_each_damage_is_one_event_with_the_right_cause_place_and_step(name):
    found = outcome(RUNS[name])
    assert found.right, found.rows()


def test_a_healthy_run_raises_nothing():
    assert outcome(QUIET).rows()[0][4] == "none"


@pytest.mark.parametrize(("table", "file"), [(tables.provoked, "provoked"), (tables.healthy, "healthy_ranges")])
def test_the_readme_has_the_table_of_the_recorded_runs(table, file):
    root = Path(__file__).parents[2]
    assert table(root / f".github/assets/{file}.csv") in (root / "attnscale/diagnostics/README.md").read_text()


def test_every_recorded_run_was_as_expected():
    text = (Path(__file__).parents[2] / ".github/assets/provoked.csv").read_text()
    assert ",yes," in text
    assert ",NO," not in text
