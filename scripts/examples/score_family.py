"""A score family of your own: draw raw scores, state predictions, and measure the scale Λ of their temperature.

python scripts/examples/score_family.py
attnscale theory gaps --family scripts/examples/score_family.py --quick

In each row one key matches the query and scores 1. All other keys have the same cosine c with the query; c is uniform
in [0.2, 0.4] and differs from row to row. A row then has Λ = ln n/(1 − c), and the median row has c = 0.3.
"""

import math

import torch
from torch import Tensor

ROWS = 64  # per call; draw is called until there are enough rows
EXPONENT = 1.0  # optional: predicted p of Λ ~ (ln n)^p


def draw(n: int, generator: torch.Generator) -> Tensor:
    """Raw scores [rows, n], before the temperature; [n] is accepted as well."""
    cosine = 0.2 + 0.2 * torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
    scores = cosine.repeat(1, n)
    scores[:, 0] = 1.0
    return scores


def accumulation(n: int) -> float:
    """Optional: predicted median Λ of a row of n keys."""
    return math.log(n) / (1 - 0.3)


if __name__ == "__main__":
    from attnscale.theory import user_family

    family = user_family.UserFamily("score_family", draw, EXPONENT, accumulation)
    print(user_family.measure(family, user_family.Settings(quick=True)).summary)
