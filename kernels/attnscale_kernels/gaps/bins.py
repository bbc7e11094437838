"""The bins in which gaps are counted for a bracket of Λ; the kernels and `attnscale.statistics.gaps` read them here.

With g the gap of the second best score, gaps are binned by the leading bits of x = (2 + ε)·gap/g − ε, which is 2
for g itself: `STEPS_PER_OCTAVE` bins to the octave. With N(b) keys up to the end of a bin (a, b], a rank inside has a
slope ln k/Δ_k of at most ln N(b)/a, and one of at least ln N(b)/b exists. So the upper end of a bracket is at most
`WIDTH` above the lower one. As Λ ≥ ln 2/g, keys beyond the last bin matter only in rows of more than `LONGEST` keys,
whose brackets widen slowly. The ε makes every bin a little narrower, which leaves room for rounding errors.
"""

from __future__ import annotations

STEPS_PER_OCTAVE = 4  # a power of two; four times as many would cost the kernels three times the instructions
WIDTH = 1 / STEPS_PER_OCTAVE
BINS = 16  # the last holds all keys beyond the others
EPSILON = 2.0**-10
SLACK = 2.0**-20  # of a gap over g (three roundings), of a logarithm, and of their quotient
TIED_BELOW = 2.0**-100  # a gap so small that gaps over it may overflow has no upper bound


def bin_edge(number: int) -> float:
    """Where a bin begins, as x."""
    octave, step = divmod(number, STEPS_PER_OCTAVE)
    return 2.0 ** (octave + 1) * (1 + step / STEPS_PER_OCTAVE)


def bin_start(number: int) -> float:
    """Where a bin begins, as a multiple of g."""
    return (bin_edge(number) + EPSILON) / (2 + EPSILON)


STARTS = tuple(bin_start(number) for number in range(BINS))
LONGEST = int(2 ** ((1 + WIDTH) * STARTS[-1]))
