"""One table of what quantities and alerts are called and mean: it is complete, and what people see comes from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import attnscale.diagnostics
from attnscale import Monitor, ScaledDotProductAttention
from attnscale.diagnostics.events import CAUSES
from attnscale.diagnostics.views.display import GAP_COUNT, QUANTITIES, WATCHED, quantity_of

README = (Path(attnscale.diagnostics.__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()


def everything_a_record_can_have() -> dict[str, set[str]]:
    """Names by phase, of a step with a NaN in an output and a call that cannot be measured."""
    attention = ScaledDotProductAttention("log")
    q, k, v = torch.randn(3, 1, 2, 16, 8).requires_grad_()
    with Monitor(attention, every=1, alerts=None) as monitor:
        attention(q, k, v, is_causal=True).sum().backward()
        attention(q, k, v.detach() * torch.nan, is_causal=True)
        torch.func.vmap(lambda x: attention(x, x, x, backend="reference"))(q[None].detach())
        records = monitor.step(0)
    found: dict[str, set[str]] = {"forward": set(), "backward": set(), "": set()}
    for record in records:
        for phase, name, _ in record.summaries():
            found[phase].add(name)
        found[""] |= set(record.scalars)
    return found


@pytest.mark.filterwarnings("ignore:attnscale")
def test_every_quantity_of_a_record_has_a_row_and_no_row_is_left_over():
    found = everything_a_record_can_have()
    again = found["forward"] & found["backward"]  # of the phase "forward" in the table
    for phase, names in found.items():
        for name in names - (again if phase == "backward" else set()):
            quantity = quantity_of(name)
            assert quantity.phase == phase
            assert quantity.title
            assert quantity.label != name
            assert quantity.explanation
    named = {name for names in found.values() for name in names if not name.startswith(GAP_COUNT)}
    assert named == set(QUANTITIES)
    assert found["forward"] >= {f"{GAP_COUNT}{gap}" for gap in ("0.5", "1")}


def test_every_cause_has_a_rule_in_words_and_shows_a_quantity():
    for cause in CAUSES.values():
        assert cause.rule.__doc__
        assert cause.title
        assert cause.advice
        assert cause.quantity in QUANTITIES


def test_the_terminal_shows_quantities_of_the_table():
    assert set(WATCHED) <= set(QUANTITIES)


def test_the_readme_lists_every_quantity_with_its_place_and_every_event_with_what_it_shows():
    gap = quantity_of(f"{GAP_COUNT}<t>")
    lines = [line for line in README if line.startswith("| `") and not re.search(r"Sink\(|/`|\.py`", line)]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    expected = set()
    for quantity in (*QUANTITIES.values(), gap):
        place = "forward, backward" if quantity.name in ("w_max", "entropy", gap.name) else quantity.phase or "scalars"
        expected.add((f"`{quantity.name}`", place))
    assert {(line[0], line[1]) for line in cells if len(line) == 4} == expected
    shown = {(f"`{name}`", f"`{cause.quantity}`") for name, cause in CAUSES.items()}
    assert {(line[0], line[2]) for line in cells if len(line) == 3} == shown
