"""What a policy is: a function from the number of visible keys to the temperature β."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from attnscale._util.checks import plain_numbers, read_int
from attnscale._util.files import write_yaml
from attnscale._util.processes import OwnHeads
from attnscale._util.tracing import is_watched
from attnscale.errors import ArgumentError, FrozenPolicyError, reject, reject_type
from attnscale.statistics import RowStats, StatsRequest

# A policy whose β is not finite at this length is refused when it is built.
LONGEST_USUAL_CONTEXT = 2**20


@runtime_checkable
class Policy(Protocol):
    """The part of a policy that attention relies on; `LengthPolicy` is the base class that provides it.

    `uniform` is β as a plain number where it is the same for every row there can be, else None. `needs_query` says that
    the call takes the queries too.
    """

    needs_query: ClassVar[bool]

    @property
    def uniform(self) -> float | None: ...

    def __call__(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor: ...


@dataclass(eq=False, repr=False, kw_only=True)
class LengthPolicy(nn.Module):
    """Base of all policies: subclasses are keyword dataclasses whose `formula` reads like the table row.

    It is called with n, an int or an integer tensor of any shape, optionally with the 0-based absolute positions (else
    n − 1), and returns β that broadcasts with them: fp32, or fp64 where it has fp64 parameters. Per-head policies have
    the head axis at −2: n [B, 1, Tq] or [B, H, Tq] gives β [B, H, Tq]. Rows without a key count as n = 1; a negative n
    is refused, unless it is on another device than the CPU or in a compiled graph.

    Fields are fixed after construction, since `validate` may have derived values from them: build a new policy, for
    instance with `dataclasses.replace`. Parameters, buffers and submodules are those of any `nn.Module`.

    >>> from attnscale import build_policy
    >>> build_policy("log")(torch.tensor([1, 2, 1000]))
    tensor([0.6931, 0.6931, 6.9078])
    """

    name: ClassVar[str]
    needs_query: ClassVar[bool] = False
    uses_position: ClassVar[bool] = False  # whether `formula` reads the position
    own_heads: OwnHeads | None = dataclasses.field(init=False, default=None)  # set by `keep`

    def __post_init__(self) -> None:
        # Plain fields were set before this, which nn.Module allows; parameters may be set only after it.
        nn.Module.__init__(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            if "read" in field.metadata and not (value is None and field.default is None):
                setattr(self, field.name, field.metadata["read"](field.name, value))
        self.validate()
        if not math.isfinite(self.longest_beta()):
            reject("policy", self, f"parameters whose β is finite in fp32 at {LONGEST_USUAL_CONTEXT} keys")
        self._is_built = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_built" in self.__dict__:
            self._refuse_change(name, f"{name}={value!r}")
        super().__setattr__(name, value)
        self._identify()

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name, f"deleting {name}")
        super().__delattr__(name)
        self._identify()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._identify()

    def _identify(self) -> None:
        """Compute the identity of a finished policy, which calls in any thread then only read."""
        if "_is_built" in self.__dict__:
            self.__dict__["_identity"] = _identity(self)

    def _refuse_change(self, name: str, what: str) -> None:
        if any(field.init and field.name == name for field in dataclasses.fields(self)):
            raise FrozenPolicyError(
                f"{what} is not accepted by a finished {type(self).__name__}: its fields are fixed; build a new one "
                f"with build_policy, or with dataclasses.replace(policy, {name}=...)"
            )

    def validate(self) -> None:
        """Raise if fields do not fit each other. Called once, on construction, after the check of each field."""

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        """β for integer tensors n ≥ 1 and position ≥ 0, in any floating dtype."""
        raise NotImplementedError

    @property
    def uniform(self) -> float | None:
        """β as a plain number where it depends on nothing, else None."""
        return None

    def longest_beta(self) -> float:
        """β at 2²⁰ keys as far as construction can know it; a policy where it is not finite is refused."""
        beta: Tensor = self(LONGEST_USUAL_CONTEXT).detach()
        return 1.0 if beta.is_meta else float(beta.abs().max())

    def forward(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        """β for n visible keys; see the class."""
        return self.formula(*read_lengths(n, positions)).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """That of β: fp32, or fp64 where a parameter is fp64, since its gradient must not be rounded to less."""
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.float64 if wide else torch.float32

    def keep(self, own: OwnHeads) -> None:
        """Say which heads of a layer this process has: β is given for these, and statistics carry their numbers."""
        self.own_heads = own

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data that `build_policy` takes back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        # A class of a user may hold numbers of numpy, which neither YAML nor JSON can write.
        return {"name": self.name} | {key: plain_numbers(value) for key, value in values.items()}

    def save(self, path: str | Path) -> None:
        """Write the policy as YAML that `build_policy` takes back (learned parameters live in `state_dict`)."""
        write_yaml(path, self.to_dict())

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items() if key != "name")


class FormulaPolicy(LengthPolicy):
    """Base of the policies whose β depends on n, position and plain attributes only, so that it may be remembered.

    `identity` is the key: policies of the same class with the same attributes share what is remembered.
    """

    @property
    def identity(self) -> Hashable | None:
        """What β depends on besides n and position; None where that is not plain data, and β must not be remembered."""
        state = self.__dict__
        if state["_parameters"] or state["_buffers"] or state["_modules"]:
            return None
        return state["_identity"]  # type: ignore[no-any-return]


@dataclass(eq=False, repr=False, kw_only=True)
class UniformPolicy(FormulaPolicy):
    """Base of the policies whose β is one number: a constant, or a factor fixed by a configuration's length ratio."""

    def value(self) -> float:
        """β."""
        raise NotImplementedError

    @property
    def uniform(self) -> float:
        return self.value()

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return torch.full_like(n, self.value(), dtype=torch.float64 if _has_float64(n) else torch.float32)


def _identity(policy: LengthPolicy) -> Hashable | None:
    """The class itself, as a name may be used twice, and every attribute with its type: 1, 1.0 and True differ.

    Attributes enter as text, whose hash Python keeps, and in which 0.0 and −0.0 differ.
    """
    values = {name: value for name, value in list(policy.__dict__.items()) if name not in _UNREAD}
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values()):
        return None
    return type(policy), repr([(name, type(value), value) for name, value in values.items()])


# What nn.Module keeps in every instance, but for `training`, an attribute like any other that a formula may read; the
# numbers of heads, on which no β without parameters depends; and the identity itself.
_UNREAD = (frozenset(nn.Module().__dict__) | {"own_heads", "_identity"}) - {"training"}


def real(x: Tensor) -> Tensor:
    """An integer tensor as floating point: fp64 where the device has it, so that fp32 β is right to the last bit."""
    return x.to(torch.float64 if _has_float64(x) else torch.float32)


def ln(n: Tensor) -> Tensor:
    """ln n with ln 1 := ln 2.

    With one key any β gives the same softmax, but β = 0 would make a kernel's running maximum meaningless and, with an
    attention sink, would ignore the key.
    """
    return torch.log(real(n.clamp(min=2)))


def read_lengths(n: int | Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """n ≥ 1 and the position, n − 1 where it is not given, as int64 tensors."""
    given = integers("n", n)
    if _is_negative(n):
        reject("n", n, "an int or an integer tensor >= 0")
    visible = given.clamp(min=1)
    return visible, visible - 1 if positions is None else integers("positions", positions).clamp(min=0)


def integers(argument: str, value: object) -> Tensor:
    """`value` as an int64 tensor; anything but an int or an integer tensor is refused."""
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            reject_type(argument, value.dtype, "an integer dtype")
        return value.to(torch.int64)
    number = read_int(argument, value, "an int or an integer tensor")
    # On the host whatever the default device: a policy may be built under torch.device("meta").
    return torch.as_tensor(number, dtype=torch.int64, device="cpu")


def _is_negative(n: int | Tensor) -> bool:
    """Whether n, or one of them, is negative; False where reading a tensor back would synchronise or break a graph."""
    if isinstance(n, int):
        return n < 0
    return type(n) is Tensor and n.device.type == "cpu" and not is_watched() and bool((n < 0).any())


def _has_float64(x: Tensor) -> bool:
    return x.device.type != "mps"


@dataclass(eq=False, repr=False, kw_only=True)
class ScorePolicy(LengthPolicy):
    """Base of the policies that read scores: `request` says which statistics at β = 1, `from_stats` makes β of them.

    `needs_scores` may change: a policy frozen in eval mode is a function of length like any other.
    """

    needs_scores: ClassVar[bool] = True
    gradient: ClassVar[str] = "detach"

    @property
    def request(self) -> StatsRequest:
        """What to measure at β = 1."""
        raise NotImplementedError

    def from_stats(self, stats: RowStats, accumulation: Tensor | None = None) -> Tensor:
        """β [B, H, Tq] in fp32; `accumulation` is Λ with a gradient, where `gradient="through"` asks for it."""
        raise NotImplementedError

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        raise ArgumentError(f"policy {self.name!r} cannot be called with lengths alone: it needs the scores of a row")

    def longest_beta(self) -> float:
        return 1.0  # of no length: `from_stats` bounds it


def reads_scores(policy: Policy) -> TypeGuard[ScorePolicy]:
    """Whether a policy needs the scores of a call at the moment."""
    return isinstance(policy, ScorePolicy) and policy.needs_scores
