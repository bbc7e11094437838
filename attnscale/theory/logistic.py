"""The logistic function without overflow: the weight of one key against all others."""

from __future__ import annotations

import math


def logistic(odds: float) -> float:
    """1/(1 + e^(−odds)), to full relative precision at both ends.

    >>> logistic(0.0), logistic(-1000.0), logistic(1000.0)
    (0.5, 0.0, 1.0)
    """
    return 1.0 / (1.0 + math.exp(-odds)) if odds > -700.0 else math.exp(odds)
