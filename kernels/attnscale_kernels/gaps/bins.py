"""Bins of the gap histogram that brackets Λ, shared by the kernels and `attnscale.statistics.gaps`.

Let g be the gap of the second-best score. Gaps are binned by the leading bits of x = (2 + ε)·gap/g − ε, which is 2 for
g itself, with `STEPS_PER_OCTAVE` bins per octave. With N(b) keys up to the end of a bin (a, b], the slope ln k/Δ_k of
any rank k inside is at most ln N(b)/a, and some rank has a slope of at least ln N(b)/b. The upper end of the bracket is
therefore at most a fraction `WIDTH` above the lower end. As Λ ≥ ln 2/g, keys beyond the last bin matter only in rows of
more than `LONGEST` keys, whose brackets widen slowly. ε makes every bin slightly narrower, which leaves room for
rounding errors.
"""

from __future__ import annotations

STEPS_PER_OCTAVE = 4  # a power of two; four times as many bins would triple the instructions of the kernels
WIDTH = 1 / STEPS_PER_OCTAVE
BINS = 16  # the last bin holds all larger gaps
EPSILON = 2.0**-10
SLACK = 2.0**-20  # rounding errors of gap/g (three roundings), of a logarithm, and of their quotient
TIED_BELOW = 2.0**-100  # below this gap, gap ratios may overflow, so there is no upper bound


def bin_edge(number: int) -> float:
    """Return the start of a bin in units of x."""
    octave, step = divmod(number, STEPS_PER_OCTAVE)
    return 2.0 ** (octave + 1) * (1 + step / STEPS_PER_OCTAVE)


def bin_start(number: int) -> float:
    """Return the start of a bin as a multiple of g."""
    return (bin_edge(number) + EPSILON) / (2 + EPSILON)


STARTS = tuple(bin_start(number) for number in range(BINS))
LONGEST = int(2 ** ((1 + WIDTH) * STARTS[-1]))
