"""The length laws: constant, √ln n, ln n, (ln n)² and nᵖ (policies/README.md §2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnscale.errors import reject
from attnscale.policies.base import FormulaPolicy, UniformPolicy, integers, ln, real
from attnscale.policies.fields import flag, length, positive


@dataclass(eq=False, repr=False, kw_only=True)
class Constant(UniformPolicy):
    """β. With `beta=1` this is standard attention."""

    name = "constant"
    beta: float = positive(1.0)

    def value(self) -> float:
        return float(self.beta)


@dataclass(eq=False, repr=False, kw_only=True)
class LengthLaw(FormulaPolicy):
    """Base of the laws f(n), each in three forms.

    Absolute `γ·f(n)` for training from scratch; anchored `f(n)/f(L)` for a model trained at length L, so that β(L) = 1;
    anchored with floor `max(1, f(n)/f(L))`, which changes nothing inside the training length.
    """

    gamma: float = positive(1.0)
    reference_length: int | None = length(None)
    floor: bool = flag(False)

    def law(self, n: Tensor) -> Tensor:
        """f(n)."""
        raise NotImplementedError

    def validate(self) -> None:
        if self.reference_length is None:
            if self.floor:
                reject("floor", True, "False unless reference_length is given: only the anchored form has a floor")
            self._f_reference = None
        else:
            if self.gamma != 1.0:
                reject("gamma", self.gamma, "1 where reference_length is given: the anchored form has β(L) = 1")
            self._f_reference = float(self.law(integers("reference_length", self.reference_length)))

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        if self._f_reference is None:
            return self.gamma * self.law(n)
        anchored = self.law(n) / self._f_reference
        return anchored.clamp(min=1.0) if self.floor else anchored


@dataclass(eq=False, repr=False, kw_only=True)
class SqrtLog(LengthLaw):
    """f(n) = √(ln n): Gaussian scores condense at √(2 ln n)/σ."""

    name = "sqrt_log"

    def law(self, n: Tensor) -> Tensor:
        return ln(n).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class Log(LengthLaw):
    """f(n) = ln n: the critical scale of tokens on a simplex (arXiv:2510.05554)."""

    name = "log"

    def law(self, n: Tensor) -> Tensor:
        return ln(n)


@dataclass(eq=False, repr=False, kw_only=True)
class LogSquared(LengthLaw):
    """f(n) = (ln n)²: the order of YaRN's factor, critical for a cluster at gap 1/ln n."""

    name = "log_squared"

    def law(self, n: Tensor) -> Tensor:
        return ln(n).square()


@dataclass(eq=False, repr=False, kw_only=True)
class Power(LengthLaw):
    """f(n) = nᵖ: keys on a sphere in dimension d have p = 2/(d − 1)."""

    name = "power"
    exponent: float = positive()

    def law(self, n: Tensor) -> Tensor:
        return real(n).pow(self.exponent)
