"""The runs with and without the attention loss: what they write, and the committed table."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch

from attnscale import ArgumentError
from scripts.training import attention_loss
from scripts.training.attention_loss import RATES, TERMS, AttentionLossRuns, run

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / ".github" / "assets"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_writes_its_steps_its_table_and_its_figure(tmp_path):
    before = torch.get_rng_state()
    run(AttentionLossRuns(seeds=[3], steps=2, output=tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "attention_loss.csv",
        "attention_loss.png",
        "attention_loss_summary.csv",
    ]
    table = read(tmp_path / "attention_loss_summary.csv")
    assert [(row["rate"], row["terms"], row["seed"]) for row in table] == [(r, t, "3") for r in RATES for t in TERMS]
    assert len({row["held_out_loss"] for row in table if row["rate"] == "usable"}) == 1  # no term acts in two steps


@pytest.mark.parametrize("bad", [{"seeds": []}, {"steps": 0}], ids=str)
def test_bad_configurations_are_rejected(bad):
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        AttentionLossRuns(**bad)


def test_the_committed_runs_collapse_without_the_terms_only():
    found = {}
    for row in read(ASSETS / "attention_loss_summary.csv"):
        found.setdefault((row["rate"], row["terms"]), []).append(row)
    none, floor, hinge = (found["too high", terms] for terms in TERMS)
    assert all(len(rows) == 3 for rows in found.values())
    assert all(float(row["entropy_share"]) < 0.2 for row in none)
    assert all(float(row["entropy_share"]) > attention_loss.FLOOR for row in (*floor, *hinge))
    assert all(float(row["max_logit"]) < 40 for row in hinge)


def test_the_guide_has_the_numbers_of_the_committed_table():
    guide = (ROOT / "scripts" / "docs" / "pages" / "guide.md").read_text(encoding="utf-8")
    shown = [float(x) for x in re.findall(r"^\| 0\.0\d+ \| .* \| (\d\.\d{3}) \|", guide, re.M)]
    losses: dict[tuple[str, str], list[float]] = {}
    for row in read(ASSETS / "attention_loss_summary.csv"):
        losses.setdefault((row["rate"], row["terms"]), []).append(float(row["held_out_loss"]))
    assert shown == [round(sum(x) / len(x), 3) for x in losses.values()]
