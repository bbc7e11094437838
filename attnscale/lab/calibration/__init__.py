"""Calibration: measure the growth of Λ, predict where heads lose their keys, fit temperatures, and test them.

Data goes one way: `reading` builds and reads sequences, `measuring` measures Λ, `growth` fits it against length,
`heads` draws the conclusions for each head, `plans` turns exponents into plans, `fit` learns exponents from the loss,
`held_out` compares plans on unused data, `run` runs all of it with the `options`, `description` writes it down.
"""

from attnscale.lab.calibration.options import Calibration
from attnscale.lab.calibration.run import calibrate

__all__ = ["Calibration", "calibrate"]
