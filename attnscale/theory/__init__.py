"""The papers behind the temperature laws as code: closed forms beside simulators, and experiments that compare them.

One module per model: `families` (raw scores of known kinds), `condensation`, `gap_counting`, `simplex`, `phase` with
`bounds`, `sphere`. `experiments/` is what `attnscale theory NAME` runs. `import attnscale` imports none of it.
"""

from typing import TYPE_CHECKING

# Modules that others have taken in.
_MOVED = {
    "gaps": "gap_counting",
    "spacings": "gap_counting",
    "tokens": "phase",
    "poisson": "sphere",
    "poisson_dirichlet": "condensation",
    "log_normal_sums": "condensation",
    "files": "experiments",
    "experiment": "experiments",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        moved = f": see attnscale.theory.{_MOVED[name]}" if name in _MOVED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{moved}")
