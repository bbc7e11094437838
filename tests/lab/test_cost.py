"""The estimate of the time that an evaluation still takes."""

from __future__ import annotations

import pytest

from attnscale.lab.cost import Clock, spoken


def clock(*cells: tuple[int, float]) -> Clock:
    made = Clock()
    for cell in cells:
        made.add(*cell)
    return made


def test_without_a_finished_cell_there_is_no_estimate() -> None:
    assert clock().rest([512]) == ""


def test_lengths_that_were_measured_take_their_mean() -> None:
    assert clock((512, 2.0), (512, 4.0)).rest([512, 512]) == "about 6 s left"


def test_one_length_gives_a_lower_bound_for_longer_ones() -> None:
    assert clock((512, 2.0)).rest([1024]) == "at least 4 s left"


@pytest.mark.parametrize(("seconds", "rest"), [(6.0, "18 s"), (2.0, "4 s"), (1.0, "2 s"), (90.0, "6 min")])
def test_longer_ones_grow_as_the_measured_lengths_do_between_linear_and_quadratic(seconds: float, rest: str) -> None:
    assert clock((512, 2.0), (1024, seconds)).rest([2048]) == f"about {rest} left"


def test_durations_are_in_their_largest_unit() -> None:
    assert [spoken(seconds) for seconds in (0.2, 99, 100, 5999, 7200)] == ["0 s", "99 s", "2 min", "100 min", "2.0 h"]
