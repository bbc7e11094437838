"""Comparison of the records of two runs of a model."""

from __future__ import annotations

import math


def assert_same(found, expected, *, scalars=("angle_ratio",), tolerance=1e-4):
    """The records of two runs over the same rows are equal."""
    assert [(one.layer, one.head) for one in found] == [(one.layer, one.head) for one in expected]
    for one, other in zip(found, expected, strict=True):
        for phase in ("forward", "backward"):
            theirs, others = getattr(one, phase), getattr(other, phase)
            assert theirs.keys() == others.keys()
            for name, summary in theirs.items():
                assert summary.rows == others[name].rows, name
                for part in ("mean", "p10", "p50", "p90", "min", "max"):
                    both = getattr(summary, part), getattr(others[name], part)
                    assert math.isclose(*both, rel_tol=tolerance, abs_tol=tolerance), (name, part, both)
        for name in scalars:
            both = one.scalars[name], other.scalars[name]
            assert math.isclose(*both, rel_tol=1e-4, abs_tol=1e-6), (name, both)
