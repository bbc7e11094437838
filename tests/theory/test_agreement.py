"""Agreement of a prediction with a measurement: three standard errors, equality, one-sided bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscale.theory.experiments import ROUNDING, STANDARD_ERRORS, Comparison, Kind

values = st.floats(-1e6, 1e6)
errors = st.floats(1e-3, 1e3)


@given(values, errors, st.floats(-10, 10), st.sampled_from(["exact", "limit"]))
def test_a_random_measurement_agrees_within_three_standard_errors(
    predicted: float, error: float, distance: float, kind: Kind
) -> None:
    if math.isclose(abs(distance), STANDARD_ERRORS, rel_tol=1e-3):
        return  # decided by rounding
    line = Comparison("x", "", predicted, predicted + distance * error, error, kind)
    assert line.agreement == ("yes" if abs(distance) < STANDARD_ERRORS else "no")


@given(values, errors, errors)
def test_the_error_of_a_sampled_prediction_counts_too(predicted: float, error: float, predicted_error: float) -> None:
    both = math.hypot(error, predicted_error)
    for distance, expected in ((2.9, "yes"), (3.1, "no")):
        line = Comparison("x", "", predicted, predicted + distance * both, error, "exact", predicted_error)
        assert line.agreement == expected


@given(values, st.floats(0, 1e3), st.floats(-1e3, 1e3))
def test_a_bound_is_checked_on_one_side(bound: float, error: float, excess: float) -> None:
    line = Comparison("x", "", bound, bound + excess, error, "bound")
    if not math.isclose(excess, STANDARD_ERRORS * error, rel_tol=1e-3, abs_tol=1e-6):
        assert line.agreement == ("yes" if excess <= STANDARD_ERRORS * error else "no")


@pytest.mark.parametrize("error", [None, 0.0])
@pytest.mark.parametrize("predicted", [0.0, 1.0, -1e-20, 1e20])
def test_without_randomness_exact_values_are_equal_to_rounding_and_limits_are_not_judged(
    predicted: float, error: float | None
) -> None:
    unit = abs(predicted) or 1.0
    for share, expected in ((0.0, "equal"), (0.5 * ROUNDING, "equal"), (2 * ROUNDING, "no")):
        assert Comparison("x", "", predicted, predicted + share * unit, error).agreement == expected
        assert Comparison("x", "", predicted, predicted + share * unit, error, "limit").agreement == "-"


@pytest.mark.parametrize("kind", ["exact", "bound"])
@pytest.mark.parametrize("error", [None, 1.0])
def test_nan_agrees_with_nothing(kind: Kind, error: float | None) -> None:
    assert Comparison("x", "", 1.0, math.nan, error, kind).agreement == "no"
