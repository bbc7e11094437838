"""Models of raw attention scores with a known accumulation scale Λ."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnscale._util.checks import read_int
from attnscale.errors import ArgumentTypeError, reject


@dataclass(frozen=True)
class Family:
    """A model of the raw scores of attention rows: `sample` draws rows, `accumulation` is the law of Λ.

    Attributes:
        formula: the law of Λ as text.
        exponent: ξ of Λ ≍ (ln n)^ξ; None if Λ grows like a power of n.
        exact: whether every row has Λ = `accumulation(n)` at every n.
        random: whether the Λ of a row stays random for n → ∞, because the best score is one of many of the same kind.
            Λ/`accumulation(n)` then tends to the distribution of `gap_counting.limit_ratio`; otherwise it tends to 1.
    """

    formula: ClassVar[str]
    exponent: ClassVar[float | None]
    exact: ClassVar[bool] = False
    random: ClassVar[bool] = False

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        """Independent rows of raw scores [rows, n] in fp64."""
        raise NotImplementedError

    def accumulation(self, n: int) -> float:
        """Λ at n keys according to the law."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Family):
    """Independent N(0, σ²) scores, as from keys that are independent of the query. Λ ~ √(2 ln n)/σ."""

    formula = "√(2 ln n)/σ"
    exponent = 0.5
    random = True
    sigma: float = 1.0

    def __post_init__(self) -> None:
        _check("sigma", self.sigma, "a number > 0", self.sigma > 0)

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        return self.sigma * _normal(rows, n, generator=generator)

    def sample_best(self, n: int, rows: int, ranks: int, generator: torch.Generator) -> Tensor:
        """The largest scores [rows, ranks] of rows of n keys in descending order, sampled jointly, for any n.

        The smallest of n uniform numbers are distributed like Γ_1, Γ_2, … over Γ_(n+1), the arrival times of a Poisson
        process.

        >>> Gaussian().sample_best(2**40, 2, 8, torch.Generator().manual_seed(0)).shape
        torch.Size([2, 8])
        """
        arrivals = arrival_times(rows, ranks, generator)
        others = torch.full((rows, 1), float(n + 1 - ranks), dtype=torch.float64, device="cpu")
        total = arrivals[:, -1:] + torch._standard_gamma(others, generator)
        quantiles: Tensor = torch.special.ndtri(arrivals / total)
        return -self.sigma * quantiles

    def accumulation(self, n: int) -> float:
        return math.sqrt(2 * math.log(n)) / self.sigma


@dataclass(frozen=True)
class CorrelatedGaussian(Family):
    """N(0, σ²) scores with correlation ρ: a common shift, which softmax ignores. Λ ~ √(2 ln n/(1−ρ))/σ."""

    formula = "√(2 ln n/(1−ρ))/σ"
    exponent = 0.5
    random = True
    sigma: float = 1.0
    rho: float = 0.5

    def __post_init__(self) -> None:
        _check("sigma", self.sigma, "a number > 0", self.sigma > 0)
        _check("rho", self.rho, "a number in [0, 1)", 0 <= self.rho < 1)

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        common = _normal(rows, 1, generator=generator)
        own = _normal(rows, n, generator=generator)
        return self.sigma * (math.sqrt(self.rho) * common + math.sqrt(1 - self.rho) * own)

    def accumulation(self, n: int) -> float:
        return math.sqrt(2 * math.log(n) / (1 - self.rho)) / self.sigma


@dataclass(frozen=True)
class Simplex(Family):
    """Unit tokens at equal angles: score 1 for the row's own key, ρ for all others. Λ = ln n/(1−ρ), exactly."""

    formula = "ln n/(1−ρ)"
    exponent = 1.0
    exact = True
    rho: float = 0.5

    def __post_init__(self) -> None:
        _check("rho", self.rho, "a number < 1", self.rho < 1)

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        return _with_own_key(torch.full((rows, n), self.rho, dtype=torch.float64, device="cpu"), 1.0, generator)

    def accumulation(self, n: int) -> float:
        return math.log(n) / (1 - self.rho)


@dataclass(frozen=True)
class AlmostSimplex(Family):
    """Tokens x_i = √ρ z_0 + √(1−ρ) z_i with z ~ N(0, I/d): nearly equal angles. Λ ~ ln n/(1−ρ) for d ≫ ln n.

    A token scores about 1 with itself. Other keys are Gaussian about ρ with variance D/d, D = 1−ρ, so about
    1 + (n−1)Φ(−z) keys lie within the gap t = D − z√(D/d). The law is the supremum of ln N(t)/t on that curve, to
    leading order 2 ln n/(D + √(D² − 2D ln n/d)). For ln n > dD/2 the best other key scores higher, and the law is the
    Gaussian one.
    """

    formula = "sup_z ln(1 + (n−1)Φ(−z))/(D − z√(D/d)), D = 1−ρ"
    exponent = 1.0
    rho: float = 0.5
    d: int = 1024

    def __post_init__(self) -> None:
        _check("rho", self.rho, "a number in [0, 1)", 0 <= self.rho < 1)
        object.__setattr__(self, "d", read_int("d", self.d, "an int >= 1", least=1))

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        shared = _normal(rows, self.d, generator=generator) / math.sqrt(self.d)
        token = _normal(rows, self.d, generator=generator) / math.sqrt(self.d)
        token = math.sqrt(self.rho) * shared + math.sqrt(1 - self.rho) * token
        norm = token.norm(dim=-1, keepdim=True)
        # Given the token, its products with the z_j of the others are independent N(0, |x|²/d): no keys are drawn.
        noise = math.sqrt((1 - self.rho) / self.d) * norm * _normal(rows, n, generator=generator)
        others = math.sqrt(self.rho) * (token * shared).sum(-1, keepdim=True) + noise
        return _with_own_key(others, norm**2, generator)

    def accumulation(self, n: int) -> float:
        gap, ln_n = 1 - self.rho, math.log(n)
        if 2 * ln_n > self.d * gap:
            return math.sqrt(2 * ln_n * self.d / gap)
        z = torch.linspace(-8.0, math.sqrt(2 * ln_n), 4001, dtype=torch.float64, device="cpu")
        within = torch.log1p((n - 1) * torch.special.ndtr(-z))
        reach = gap - z * math.sqrt(gap / self.d)
        return (within / reach)[reach > 0].max().item()


@dataclass(frozen=True)
class ThreeLevel(Family):
    """Own key at 1, round(κ n^τ) keys at `high`, the rest at `low`. Λ = max(ln(1 + κ n^τ)/(1 − high), ln n/(1 − low)).

    This is Assumption 3 of "Critical Attention Scaling in Long-Context Transformers" (arXiv:2510.05554). A phase
    between the uniform and the collapsed one exists if (1−τ)(1−low) + low < high.
    """

    formula = "max(ln(1 + κ n^τ)/(1 − high), ln n/(1 − low))"
    exponent = 1.0
    exact = True
    low: float = 0.1
    high: float = 0.7
    tau: float = 0.6
    kappa: float = 1.0

    def __post_init__(self) -> None:
        _check("high", self.high, f"a number between low={self.low} and 1", self.low < self.high < 1)
        _check("tau", self.tau, "a number in (0, 1]", 0 < self.tau <= 1)
        _check("kappa", self.kappa, "a number > 0", self.kappa > 0)

    def neighbours(self, n: int) -> int:
        """The number of keys at `high`."""
        return min(n - 1, round(self.kappa * math.pow(n, self.tau)))

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        scores = torch.full((rows, n), self.low, dtype=torch.float64, device="cpu")
        scores[:, : self.neighbours(n) + 1] = self.high
        scores[:, 0] = 1.0
        order = torch.rand(rows, n, generator=generator, device=generator.device).argsort(dim=-1)
        return scores.gather(-1, order)

    def accumulation(self, n: int) -> float:
        near = math.log(1 + self.neighbours(n)) / (1 - self.high)
        return near if self.neighbours(n) == n - 1 else max(near, math.log(n) / (1 - self.low))


@dataclass(frozen=True)
class Cluster(Family):
    """One key ahead of all others by 1/ln n, a gap that shrinks as the context grows. Λ = (ln n)², exactly."""

    formula = "(ln n)²"
    exponent = 2.0
    exact = True

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        others = torch.full((rows, n), -1 / math.log(max(n, 2)), dtype=torch.float64, device="cpu")
        return _with_own_key(others, 0.0, generator)

    def accumulation(self, n: int) -> float:
        return math.log(n) ** 2


@dataclass(frozen=True)
class Sphere(Family):
    """Cosines with keys uniform on the sphere: P(1 − s ≤ t) ~ C_d t^((d−1)/2), hence Λ ~ (n C_d)^(2/(d−1))."""

    formula = "(n C_d)^(2/(d−1))"
    exponent = None
    random = True
    d: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "d", read_int("d", self.d, "an int >= 2", least=2))

    def sample(self, n: int, rows: int, generator: torch.Generator) -> Tensor:
        along = _normal(rows, n, generator=generator)
        squares = along**2
        for _ in range(self.d - 1):
            squares += _normal(rows, n, generator=generator) ** 2
        return along / squares.sqrt_()

    def accumulation(self, n: int) -> float:
        return math.exp(2 / (self.d - 1) * (math.log(n) + ln_cap_constant(self.d)))


FAMILIES: dict[str, type[Family]] = {
    "gaussian": Gaussian,
    "correlated_gaussian": CorrelatedGaussian,
    "simplex": Simplex,
    "almost_simplex": AlmostSimplex,
    "three_level": ThreeLevel,
    "cluster": Cluster,
    "sphere": Sphere,
}


def family(name: str, **parameters: float) -> Family:
    """Build a family by name.

    Args:
        name: a key of `FAMILIES`.
        parameters: fields of that family, such as `sigma`, `rho` or `d`.

    Returns:
        The family.

    Raises:
        ArgumentError: the name is unknown, or a parameter is out of range.
        ArgumentTypeError: the family does not have this parameter.

    Example:
        >>> family("simplex", rho=0.75).accumulation(1024)
        27.7258...
    """
    if name not in FAMILIES:
        reject("name", name, ", ".join(FAMILIES))
    kind = FAMILIES[name]
    known = [field.name for field in dataclasses.fields(kind)]
    for parameter in parameters:
        if parameter not in known:
            raise ArgumentTypeError(f"{name} has no parameter {parameter!r}: expected {', '.join(known) or 'none'}")
    return kind(**parameters)


def sample(name: str, n: int, rows: int, generator: torch.Generator, **parameters: float) -> Tensor:
    """Draw rows of raw scores from a family.

    Args:
        name: a key of `FAMILIES`.
        n: keys per row.
        rows: number of rows.
        generator: the same state gives the same scores.
        parameters: fields of the family.

    Returns:
        Raw scores [rows, n] in fp64.

    Raises:
        ArgumentError: the name is unknown, or a number is out of range.
        ArgumentTypeError: the family does not have this parameter.

    Example:
        >>> sample("cluster", 4, 2, torch.Generator().manual_seed(0)).amax(-1)
        tensor([0., 0.], dtype=torch.float64)
    """
    n = read_int("n", n, "an int >= 1", least=1)
    rows = read_int("rows", rows, "an int >= 1", least=1)
    return family(name, **parameters).sample(n, rows, generator)


def arrival_times(rows: int, points: int, generator: torch.Generator) -> Tensor:
    """Arrival times Γ_1 < Γ_2 < … of unit Poisson processes, [rows, points].

    >>> arrival_times(2, 3, torch.Generator().manual_seed(0)).diff().min() > 0
    tensor(True)
    """
    return torch.empty(rows, points, dtype=torch.float64, device="cpu").exponential_(generator=generator).cumsum(-1)


def ln_cap_constant(d: int) -> float:
    """ln C_d for keys uniform on the sphere: C_d = 2^((d−1)/2) Γ(d/2)/((d−1) √π Γ((d−1)/2)).

    >>> round(math.exp(ln_cap_constant(3)), 12)
    0.5
    """
    ln_gammas = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - math.log(math.pi) / 2
    return (d - 1) / 2 * math.log(2) - math.log(d - 1) + ln_gammas


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device=generator.device)


def _with_own_key(others: Tensor, own: Tensor | float, generator: torch.Generator) -> Tensor:
    """Put the score of the row's own key at a random position of each row."""
    rows, n = others.shape
    place = torch.randint(n, (rows, 1), generator=generator, device=generator.device)
    return others.scatter(-1, place, torch.as_tensor(own, dtype=others.dtype, device=others.device).expand(rows, 1))


def _check(argument: str, value: object, accepted: str, holds: bool) -> None:
    if not holds:
        reject(argument, value, accepted)
