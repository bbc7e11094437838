"""The theory behind the temperature laws: closed forms, simulators, and experiments that compare them.

One module per model: `families` (raw scores with a known Λ), `user_family` (your own scores), `condensation`,
`gap_counting`, `simplex`, `phase` with `bounds`, `sphere`. `experiments/` has the experiments of `attnscale theory`.
`import attnscale` does not import this package.
"""

from typing import TYPE_CHECKING

# Former modules, and the modules that now hold their contents.
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
