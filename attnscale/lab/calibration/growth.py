"""Growth of Λ with length, from measurements at a few lengths: two forms, their intervals, and what they predict.

ln Λ is fitted by least squares against ln n (a power of n) and against ln ln n (a power of ln n). Both forms fit a few
octaves almost equally well and differ beyond, so predictions are given for both. Their bracket shows how much depends
on the form; Λ can follow neither (README.md has the hits and misses).
Intervals are bootstrap intervals over sequences; the rows of one sequence are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnscale.errors import reject

DRAWS = 1000
# With a share of resamples between these two, the data do not decide between the forms.
UNDECIDED = (0.05, 0.95)

FormName = Literal["power", "log"]
FORMS: tuple[FormName, ...] = ("power", "log")


@dataclass(frozen=True)
class Form:
    """ln Λ(n) = level + exponent·x(n), with x = ln n ("power") or ln ln n ("log").

    `level` and `exponent` are [1 + draws]: the estimate, then its bootstrap values.

    >>> form = Form("power", torch.tensor([0.0]), torch.tensor([0.5]))
    >>> form.at(16.0).tolist(), form.length_where(8.0).tolist()
    ([4.0], [64.0])
    """

    name: FormName
    level: Tensor
    exponent: Tensor

    def at(self, n: float) -> Tensor:
        """Return Λ(n) [1 + draws]."""
        return (self.level + self.exponent * abscissa(self.name, n)).exp()

    def length_where(self, scale: float) -> Tensor:
        """Return the length [1 + draws] at which Λ reaches a value; ∞ if Λ does not grow."""
        x = (math.log(scale) - self.level) / self.exponent
        length = x.exp() if self.name == "power" else x.exp().exp()
        return torch.where(self.exponent > 0, length, math.inf)


@dataclass(frozen=True)
class Growth:
    """The growth of Λ of one head.

    Attributes:
        lengths: the measured lengths.
        medians: Λ at each length: the median over all rows.
        lows, highs: ends of the 95 % intervals of the medians.
        forms: the two fitted forms.
        power_share: share of resamples in which the power of n fits better than the power of ln n.
    """

    lengths: tuple[int, ...]
    medians: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    forms: Mapping[FormName, Form]
    power_share: float

    @property
    def decided(self) -> FormName | None:
        """The form that the data prefer, or None if they cannot decide."""
        if UNDECIDED[0] < self.power_share < UNDECIDED[1]:
            return None
        return "power" if self.power_share >= UNDECIDED[1] else "log"

    def exponent(self, name: FormName) -> tuple[float, float, float]:
        """Return the exponent of a form with its 95 % interval."""
        return with_interval(self.forms[name].exponent)

    def predict(self, n: float) -> tuple[float, float]:
        """Return the bracket of Λ(n): the lower and upper end of the 95 % intervals of both forms."""
        ends = [with_interval(form.at(n))[1:] for form in self.forms.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def lost_at(self, criticality: float = 1.0) -> dict[FormName, tuple[float, float, float]]:
        """Return the length at which r = 1/Λ falls below a value under β = 1, by form, with its interval."""
        return {name: with_interval(form.length_where(1 / criticality)) for name, form in self.forms.items()}


def abscissa(name: FormName, n: float) -> float:
    """Return x(n) of a form."""
    return math.log(n) if name == "power" else math.log(math.log(n))


def with_interval(values: Tensor) -> tuple[float, float, float]:
    """Return an estimate and its 95 % interval from [1 + draws].

    >>> with_interval(torch.tensor([1.0, 0.0, 2.0]))
    (1.0, 0.05..., 1.95...)
    """
    drawn = values[1:].sort().values
    # Not `quantile`, which interpolates between infinite lengths and gives NaN.
    ends = [0.025 * (len(drawn) - 1), 0.975 * (len(drawn) - 1)]
    low, high = (_between(drawn, end) for end in ends)
    return values[0].item(), low, high


def _between(ordered: Tensor, place: float) -> float:
    left, right = ordered[math.floor(place)].item(), ordered[math.ceil(place)].item()
    return left if left == right else left + (place - math.floor(place)) * (right - left)


def fit_growth(values: Mapping[int, Sequence[Tensor]], *, draws: int = DRAWS, seed: int = 0) -> Growth:
    """Fit both forms to Λ of rows.

    Args:
        values: length → Λ of each sequence, [R] per sequence.
        draws: number of bootstrap resamples.
        seed: seed of the resamples.

    Returns:
        The fitted `Growth`.

    Raises:
        ArgumentError: there are fewer than three lengths or two sequences per length, or Λ is 0 or infinite in half of
            the rows.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> rows = {
        ...     n: [n**0.25 * torch.rand(8, generator=generator).add(0.5) for _ in range(32)] for n in (64, 128, 256)
        ... }
        >>> round(fit_growth(rows).exponent("power")[0], 1)
        0.2
    """
    lengths = tuple(sorted(values))
    if len(lengths) < 3:
        reject("lengths", lengths, "three or more lengths for a fit of growth")
    if min(len(values[length]) for length in lengths) < 2:
        reject("samples", min(len(values[length]) for length in lengths), "two or more sequences at each length")
    generator = torch.Generator().manual_seed(seed)
    medians = torch.stack([_medians(values[length], draws, generator) for length in lengths])  # [K, 1 + draws]
    if not bool((medians > 0).all()) or not bool((medians < 1e29).all()):
        reject("Λ", medians[:, 0].tolist(), "a positive, finite median at every length")
    logs = medians.log()
    forms: dict[FormName, Form] = {}
    residuals = []
    for name in FORMS:
        x = torch.tensor([abscissa(name, length) for length in lengths], dtype=logs.dtype, device=logs.device)
        centred = x - x.mean()
        exponent = (centred[:, None] * logs).sum(0) / centred.square().sum()
        level = logs.mean(0) - exponent * x.mean()
        forms[name] = Form(name, level, exponent)
        residuals.append((logs - level - exponent * x[:, None]).square().sum(0))
    ends = [with_interval(median) for median in medians]
    power_share = (residuals[0][1:] < residuals[1][1:]).double().mean().item()
    middle, low, high = (tuple(end[i] for end in ends) for i in range(3))
    return Growth(lengths, middle, low, high, forms, power_share)


def _medians(sequences: Sequence[Tensor], draws: int, generator: torch.Generator) -> Tensor:
    """Return the median over all rows [1 + draws]: of the sequences, and of resampled sequences."""
    rows = max(len(one) for one in sequences)
    table = torch.full((len(sequences), rows), math.nan, dtype=torch.float64, device="cpu")
    for number, one in enumerate(sequences):
        table[number, : len(one)] = one.double()
    drawn = torch.randint(len(sequences), (draws, len(sequences)), generator=generator, device=generator.device)
    index = torch.cat([torch.arange(len(sequences), device="cpu")[None], drawn])
    return torch.cat([table[part].flatten(1).nanmedian(1).values for part in torch.split(index, 200)])
