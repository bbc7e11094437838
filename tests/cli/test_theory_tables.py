"""The tables of `attnscale theory` in a terminal of 80 and of 120 columns: every number stays on one line."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attnscale.cli.theory import comparison_table, family_tables
from attnscale.theory.experiments import NAMES, Comparison
from attnscale.theory.user_family import Settings, find_family, measure

ASSETS = Path(__file__).resolve().parents[2] / ".github" / "assets"


def printed(tables: list, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for table in tables:
        console.print(table)
    return console.file.getvalue().splitlines()


def committed(name: str) -> list[Comparison]:
    with (ASSETS / f"theory_{name}_comparisons.csv").open(newline="") as file:
        return [
            Comparison(
                row["quantity"],
                row["parameters"],
                float(row["predicted"]),
                float(row["measured"]),
                float(row["standard_error"]) if row["standard_error"] else None,
                row["kind"],
                float(row["predicted_error"]),
            )
            for row in csv.DictReader(file)
        ]


def cells(line: Comparison) -> list[str]:
    error = [] if line.standard_error is None else [f"{line.standard_error:.2g}"]
    numbers = [f"{line.predicted:.5g}", f"{line.measured:.5g}", *error, f"{line.relative_error:+.1e}"]
    return [*numbers, line.kind, line.agreement]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", NAMES)
def test_no_number_of_an_experiment_is_folded(name: str, width: int) -> None:
    comparisons = committed(name)
    lines = printed([comparison_table(name, comparisons, 1.0, width)], width)
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines]
    for comparison in comparisons:
        expected = cells(comparison)
        assert any(row[-len(expected) :] == expected for row in rows), expected


@given(
    st.lists(
        st.tuples(st.floats(-1e9, 1e9), st.floats(-1e-9, 1e-9), st.floats(0, 1e9)).map(
            lambda numbers: Comparison("a [b] quantity", "n=65536, d=512", *numbers)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_numbers_of_any_size_fit_80_columns(comparisons: list[Comparison]) -> None:
    lines = printed([comparison_table("any", comparisons, None, 80)], 80)
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    for comparison in comparisons:
        expected = cells(comparison)
        assert any(row[-len(expected) :] == expected for row in rows)


def test_more_gaps_than_fit_side_by_side_get_further_tables() -> None:
    gaps = [0.1 * (step + 1) for step in range(9)]
    found = measure(find_family("gaussian"), Settings(n=(16, 32, 64), t=gaps, quick=True))
    tables = family_tables(found)
    assert len(tables) == 1 + math.ceil(len(gaps) / 4)
    lines = printed(tables, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for row in found.counts:
        assert f"{row['measured']:.5g} ± {row['standard_error']:.2g}" in text
