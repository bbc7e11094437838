"""What an experiment is: comparisons of a prediction with a measurement, the data behind them, and figures of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attnscale.errors import reject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In the order in which `all` runs them: each has a module of its name in `experiments/`.
NAMES = ("condensation", "gaps", "sphere", "simplex", "phase")

# Steps done, their total, and what is done now.
Progress = Callable[[int, int, str], None]


class Comparison(NamedTuple):
    """One line of the printed table. `standard_error` is that of the measured value; None where nothing is random."""

    quantity: str
    parameters: str
    predicted: float
    measured: float
    standard_error: float | None = None

    @property
    def relative_error(self) -> float:
        """(measured − predicted)/|predicted|; the difference itself where zero is predicted.

        >>> Comparison("E w_max", "n=64", predicted=0.5, measured=0.51).relative_error
        0.02...
        """
        return (self.measured - self.predicted) / (abs(self.predicted) or 1.0)


class Experiment(NamedTuple):
    """What an experiment found; `files.write` makes CSV, PNG and SVG of it, each name preceded by that of it.

    `figures` draw from `data` alone, when they are called. `strip` has those panels of figures that stand in the strip
    of the root README: each draws on axes of its own.
    """

    name: str
    comparisons: list[Comparison]
    data: dict[str, list[dict[str, Any]]]
    figures: dict[str, Callable[[], Figure]]
    strip: tuple[Callable[[Axes], None], ...] = ()


def run(name: str, quick: bool, progress: Progress | None = None) -> Experiment:
    """Run the experiment of that name; `quick` takes fewer and smaller samples.

    >>> run("alchemy", quick=True)
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: name='alchemy' is not accepted: expected condensation, gaps, sphere, simplex, phase
    """
    if name not in NAMES:
        reject("name", name, ", ".join(NAMES))
    module = importlib.import_module(f"attnscale.theory.experiments.{name}")
    experiment: Experiment = module.run(quick, progress)
    return experiment
