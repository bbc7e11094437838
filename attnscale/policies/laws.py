"""The length laws: constant, √ln n, ln n, (ln n)² and nᵖ (policies/README.md §2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnscale.errors import reject
from attnscale.policies.base import FormulaPolicy, UniformPolicy, integers, ln, real
from attnscale.policies.fields import flag, length, number, positive


@dataclass(eq=False, repr=False, kw_only=True)
class Constant(UniformPolicy):
    """The same β for every row; `beta=1` is standard attention.

    Args:
        beta: The temperature, > 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("constant", beta=1.5)(8192)
        tensor(1.5000)
    """

    name = "constant"
    beta: float = positive(1.0)

    def value(self) -> float:
        return float(self.beta)


@dataclass(eq=False, repr=False, kw_only=True)
class LengthLaw(FormulaPolicy):
    """Base class of the laws f(n). β has the shape of n. Each law has three forms.

    - Absolute, `γ·f(n)`: for training from scratch.
    - Anchored, `f(n)/f(L)`: for a model trained at length L, so that β(L) = 1.
    - Anchored with floor, `max(1, f(n)/f(L))`: unchanged up to the training length.

    Args:
        gamma: The factor γ > 0 of the absolute form; must be 1 in the anchored form.
        reference_length: The length L ≥ 2 of the anchored form; None for the absolute form.
        floor: Keep β = 1 up to `reference_length`, which it requires.
    """

    gamma: float = positive(1.0)
    reference_length: int | None = length(None)
    floor: bool = flag(False)

    def law(self, n: Tensor) -> Tensor:
        """Return f(n)."""
        raise NotImplementedError

    def validate(self) -> None:
        if self.reference_length is None:
            if self.floor:
                reject("floor", True, "False without reference_length: only the anchored form has a floor")
            self._f_reference = None
        else:
            if self.gamma != 1.0:
                reject("gamma", self.gamma, "1 with reference_length: the anchored form has β(L) = 1")
            self._f_reference = float(self.law(integers("reference_length", self.reference_length)))

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        if self._f_reference is None:
            return self.gamma * self.law(n)
        anchored = self.law(n) / self._f_reference
        if not self.floor:
            return anchored
        return anchored.clamp(min=1.0) if self.grows else anchored.clamp(max=1.0)

    @property
    def grows(self) -> bool:
        """Whether f grows with n."""
        return True


@dataclass(eq=False, repr=False, kw_only=True)
class SqrtLog(LengthLaw):
    """f(n) = √(ln n): Gaussian scores condense at √(2 ln n)/σ.

    Fields and forms: see `LengthLaw`.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("sqrt_log", reference_length=2048)(8192)
        tensor(1.0871)
    """

    name = "sqrt_log"

    def law(self, n: Tensor) -> Tensor:
        return ln(n).sqrt()


@dataclass(eq=False, repr=False, kw_only=True)
class Log(LengthLaw):
    """f(n) = ln n: the critical scale of tokens on a simplex (arXiv:2510.05554).

    Fields and forms: see `LengthLaw`.

    Example:
        >>> import torch
        >>> from attnscale import build_policy
        >>> build_policy("log", reference_length=2048, floor=True)(torch.tensor([512, 2048, 8192]))
        tensor([1.0000, 1.0000, 1.1818])
    """

    name = "log"

    def law(self, n: Tensor) -> Tensor:
        return ln(n)


@dataclass(eq=False, repr=False, kw_only=True)
class LogSquared(LengthLaw):
    """f(n) = (ln n)²: the order of YaRN's factor, critical for a cluster at gap 1/ln n.

    Fields and forms: see `LengthLaw`.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("log_squared", reference_length=2048)(8192)
        tensor(1.3967)
    """

    name = "log_squared"

    def law(self, n: Tensor) -> Tensor:
        return ln(n).square()


@dataclass(eq=False, repr=False, kw_only=True)
class Power(LengthLaw):
    """f(n) = nᵖ: keys on a sphere in dimension d have p = 2/(d − 1).

    Other fields and forms: see `LengthLaw`. `attnscale calibrate` fits p per head.

    Args:
        exponent: The exponent p. With `floor` it may be negative or 0: β is then at most 1 beyond the reference length.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("power", exponent=0.5)(64)
        tensor(8.)
    """

    name = "power"
    exponent: float = number("a number")

    def validate(self) -> None:
        super().validate()
        if self.exponent <= 0 and not self.floor:
            reject("exponent", self.exponent, "a number > 0, or any number with floor=True")

    @property
    def grows(self) -> bool:
        return self.exponent > 0

    def law(self, n: Tensor) -> Tensor:
        return real(n).pow(self.exponent)
