"""Base classes of policies: functions from the number of visible keys to the temperature β."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from attnscale._util.checks import plain_numbers, read_int
from attnscale._util.files import write_yaml
from attnscale._util.processes import OwnHeads, local
from attnscale._util.tracing import is_watched
from attnscale.call.torch_arguments import refuse_context_parallel
from attnscale.errors import ArgumentError, BackendError, FrozenPolicyError, reject, reject_type
from attnscale.policies.fields import length
from attnscale.statistics import RowStats, StatsRequest

# Policies with a non-finite β at this length are rejected on construction.
LONGEST_USUAL_CONTEXT = 2**20


@runtime_checkable
class Policy(Protocol):
    """The protocol of policies used by attention; `LengthPolicy` is the base class that implements it.

    Attributes:
        needs_query: Whether the call also takes the queries [B, H, Tq, D].
        uniform: β as a float if it is the same for every possible row, else None.

    Example:
        >>> from attnscale import build_policy
        >>> isinstance(build_policy("log"), Policy), build_policy("constant").uniform
        (True, 1.0)
    """

    needs_query: ClassVar[bool]

    @property
    def uniform(self) -> float | None:
        """β as a plain number if it is the same for every row, else None."""

    def __call__(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor: ...


@dataclass(eq=False, repr=False, kw_only=True)
class LengthPolicy(nn.Module):
    """Base class of all policies. Subclasses are keyword-only dataclasses that implement `formula`.

    A policy is called with n, an int or an integer tensor of any shape, and optionally with 0-based absolute positions
    (default: n − 1). It returns β that broadcasts with them, in fp32, or in fp64 if it has fp64 parameters. Per-head
    policies have the head axis at −2: n [B, 1, Tq] or [B, H, Tq] gives β [B, H, Tq]. Rows without a key count as n = 1.
    A negative n is rejected on the CPU outside of compiled graphs.

    Fields are frozen after construction, because `validate` may derive values from them. Build a new policy instead,
    for example with `dataclasses.replace`. Parameters, buffers and submodules behave as in any `nn.Module`.

    Raises:
        ArgumentError: A field has an invalid value, or β is not finite at 2²⁰ keys.
        FrozenPolicyError: A field is assigned after construction.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("log")(torch.tensor([1, 2, 1000]))
        tensor([0.6931, 0.6931, 6.9078])
    """

    name: ClassVar[str]
    needs_query: ClassVar[bool] = False
    uses_position: ClassVar[bool] = False  # whether `formula` reads the position
    shared_tensors: ClassVar[tuple[str, ...]] = ()  # parameters and buffers without a head axis
    own_heads: OwnHeads | None = dataclasses.field(init=False, default=None)  # set by `keep`

    def __post_init__(self) -> None:
        # nn.Module allows plain fields to be set before this call, but parameters only after it.
        nn.Module.__init__(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name, None)
            if "read" in field.metadata and not (value is None and field.default is None):
                setattr(self, field.name, field.metadata["read"](field.name, value))
        self.validate()
        if not math.isfinite(self.longest_beta()):
            reject("policy", self, f"parameters with a finite fp32 β at {LONGEST_USUAL_CONTEXT} keys")
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
        """Compute the cache identity of a built policy; calls in any thread only read it."""
        if "_is_built" in self.__dict__:
            self.__dict__["_identity"] = _identity(self)

    def _refuse_change(self, name: str, what: str) -> None:
        if any(field.init and field.name == name for field in dataclasses.fields(self)):
            raise FrozenPolicyError(
                f"{what} is not accepted: the fields of {type(self).__name__} are frozen after construction; build a "
                f"new policy with build_policy or dataclasses.replace(policy, {name}=...)"
            )

    def validate(self) -> None:
        """Raise if fields are inconsistent. Called once on construction, after the check of each field."""

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        """Return β for integer tensors n ≥ 1 and position ≥ 0, in any floating dtype."""
        raise NotImplementedError

    @property
    def uniform(self) -> float | None:
        """β as a float if it is the same for every possible row, else None."""
        return None

    def longest_beta(self) -> float:
        """Return the largest β at 2²⁰ keys, as far as known at construction. A non-finite value rejects the policy."""
        beta: Tensor = self(LONGEST_USUAL_CONTEXT).detach()
        return 1.0 if beta.is_meta else float(beta.abs().max())

    def forward(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        """Return β for n visible keys; see the class."""
        return self.formula(*read_lengths(n, positions)).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of β: fp32, or fp64 if a parameter is fp64, so that its gradient is not rounded."""
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.float64 if wide else torch.float32

    def keep(self, own: OwnHeads) -> None:
        """Set the heads of a layer that this process holds: β covers these, and statistics carry their numbers."""
        self.own_heads = own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LengthPolicy:
        """Keep the dtype of buffers when the model is moved or cast: running estimates and products need fp64."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data for `build_policy`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        # Custom classes may hold numpy numbers, which neither YAML nor JSON supports.
        return {"name": self.name} | {key: plain_numbers(value) for key, value in values.items()}

    def save(self, path: str | Path) -> None:
        """Write the policy as YAML for `build_policy`. Learned parameters are in `state_dict`, not in this file."""
        write_yaml(path, self.to_dict())

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items() if key != "name")


class FormulaPolicy(LengthPolicy):
    """Base class of policies whose β depends only on n, position and plain attributes, so that it can be cached.

    Policies with equal `identity`, that is, with the same class and attributes, share cache entries.

    Example:
        >>> from attnscale.policies import build_policy
        >>> first, second = (build_policy("log", gamma=2.0) for _ in range(2))
        >>> isinstance(first, FormulaPolicy), first.identity == second.identity
        (True, True)
    """

    @property
    def identity(self) -> Hashable | None:
        """The cache key of the policy; None if it has non-plain attributes and β must not be cached."""
        state = self.__dict__
        if state["_parameters"] or state["_buffers"] or state["_modules"]:
            return None
        return state["_identity"]  # type: ignore[no-any-return]


@dataclass(eq=False, repr=False, kw_only=True)
class UniformPolicy(FormulaPolicy):
    """Base class of policies with the same β for every row: a constant, or a factor given by a length ratio.

    Example:
        >>> class Doubled(UniformPolicy):
        ...     def value(self):
        ...         return 2.0
        >>> Doubled()(1024)
        tensor(2.)
    """

    def value(self) -> float:
        """Return β."""
        raise NotImplementedError

    @property
    def uniform(self) -> float:
        return self.value()

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return torch.full_like(n, self.value(), dtype=torch.float64 if _has_float64(n) else torch.float32)


def _identity(policy: LengthPolicy) -> Hashable | None:
    """Return the class, as names may be reused, and every attribute with its type, as 1, 1.0 and True differ.

    Attributes are converted to text: Python caches its hash, and 0.0 and −0.0 differ.
    """
    values = {name: value for name, value in list(policy.__dict__.items()) if name not in _UNREAD}
    if not all(value is None or isinstance(value, (bool, int, float, str)) for value in values.values()):
        return None
    return type(policy), repr([(name, type(value), value) for name, value in values.items()])


# Attributes of every nn.Module except `training`, which a formula may read; the local heads, which do not affect β
# without parameters; and the identity itself.
_UNREAD = (frozenset(nn.Module().__dict__) | {"own_heads", "_identity"}) - {"training"}


def real(x: Tensor) -> Tensor:
    """Convert an integer tensor to fp64, or to fp32 on devices without fp64; fp32 β is then correctly rounded."""
    return x.to(torch.float64 if _has_float64(x) else torch.float32)


def ln(n: Tensor) -> Tensor:
    """ln n with ln 1 := ln 2.

    With a single key, any β gives the same softmax. β = 0, however, would invalidate a kernel's running maximum and,
    next to an attention sink, ignore the key.
    """
    return torch.log(real(n.clamp(min=2)))


def read_lengths(n: int | Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return n ≥ 1 and the position, by default n − 1, as int64 tensors."""
    given = integers("n", n)
    if _is_negative(n):
        reject("n", n, "an int or an integer tensor >= 0")
    visible = given.clamp(min=1)
    return visible, visible - 1 if positions is None else integers("positions", positions).clamp(min=0)


def integers(argument: str, value: object) -> Tensor:
    """Return an int or an integer tensor as an int64 tensor; raise for other types."""
    if isinstance(value, Tensor):
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            reject_type(argument, value.dtype, "an integer dtype")
        return value.to(torch.int64)
    number = read_int(argument, value, "an int or an integer tensor")
    # On the CPU regardless of the default device: a policy may be built under torch.device("meta").
    return torch.as_tensor(number, dtype=torch.int64, device="cpu")


def _is_negative(n: int | Tensor) -> bool:
    """Whether any n is negative; False where reading a tensor would synchronise or break a graph."""
    if isinstance(n, int):
        return n < 0
    return type(n) is Tensor and n.device.type == "cpu" and not is_watched() and bool((n < 0).any())


def _has_float64(x: Tensor) -> bool:
    return x.device.type != "mps"


@dataclass(eq=False, repr=False, kw_only=True)
class QueryPolicy(LengthPolicy):
    """Base class of policies that read the row's own query. Subclasses implement `from_query`.

    The query is the one passed to attention, in transformers models after the rotary embedding. A row's β depends on no
    other row and on no key, so that prefill, decoding and sequences split over processes agree, and its gradient
    reaches both the parameters and the query. Parameters have the heads as their first axis, except those named in
    `shared_tensors`, which are read with `shared`; `attnscale.distributed.HeadParallel` can then split the heads.

    Args:
        num_heads: The number of heads H.
        head_dim: The head dimension D.

    Example:
        >>> class Norm(QueryPolicy):
        ...     def from_query(self, q, n, position):
        ...         return q.norm(dim=-1)
        >>> Norm(num_heads=2, head_dim=4)(7, query=torch.ones(1, 2, 3, 4))[0, 0]
        tensor([2., 2., 2.])
    """

    needs_query: ClassVar[bool] = True
    num_heads: int = length(least=1)
    head_dim: int = length(least=1)

    def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
        """Return β [B, H, Tq] for queries [B, H, Tq, D], in fp32 or fp64, and n ≥ 1 and positions [..., Tq]."""
        raise NotImplementedError

    def forward(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        """Return β [B, H, Tq] for n (or positions) [..., Tq] and queries [B, H, Tq, D]."""
        if not isinstance(query, Tensor):
            reject_type("query", query, "the queries, a tensor [B, H, Tq, D]")
        heads = self.num_heads if self.own_heads is None else self.num_heads // self.own_heads.parts
        if query.dim() < 3 or query.shape[-3] != heads or query.shape[-1] != self.head_dim:
            raise ArgumentError(
                f"query of shape {list(query.shape)} is not accepted: expected [B, {heads}, Tq, {self.head_dim}], the "
                f"heads of this {getattr(self, 'name', type(self).__name__)} policy (heads distributed over processes "
                "require attnscale.distributed.HeadParallel() in the plan of parallelize_module)"
            )
        visible, position = read_lengths(n, positions)
        for lengths in (visible, position):
            if lengths.dim() and lengths.shape[-1] not in (1, query.shape[-2]):
                accepted = f"a shape that broadcasts with {query.shape[-2]} query rows"
                reject("n or positions", list(lengths.shape), accepted)
        x = query.to(torch.promote_types(query.dtype, torch.float32))
        return self.from_query(x, visible, position).to(self.dtype)

    def shared(self, x: Tensor) -> Tensor:
        """Return a tensor that all heads share; its gradient is summed over the processes that hold the heads."""
        return local(x) if self.own_heads is None else self.own_heads.shared(local(x))

    def longest_beta(self) -> float:
        return 1.0  # depends on the query


@dataclass(eq=False, repr=False, kw_only=True)
class ScorePolicy(LengthPolicy):
    """Base class of policies that read scores: `request` defines the statistics at β = 1, `from_stats` computes β.

    `needs_scores` may change: in eval mode, a policy with a frozen estimate depends on lengths only.
    """

    needs_scores: ClassVar[bool] = True
    gradient: ClassVar[str] = "detach"

    @property
    def request(self) -> StatsRequest:
        """The statistics to measure at β = 1."""
        raise NotImplementedError

    def from_stats(self, stats: RowStats, accumulation: Tensor | None = None) -> Tensor:
        """Return β [B, H, Tq] in fp32. `accumulation` is the differentiable Λ used with `gradient="through"`."""
        raise NotImplementedError

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        raise ArgumentError(f"policy {self.name!r} cannot be called with lengths only: it requires the scores of a row")

    def longest_beta(self) -> float:
        return 1.0  # does not depend on length; `from_stats` bounds it


def reads_scores(policy: Policy) -> TypeGuard[ScorePolicy]:
    """Whether a policy currently needs the scores of a call."""
    return isinstance(policy, ScorePolicy) and policy.needs_scores


def refuse_unknown_length(policy: Policy, query: Tensor, *, known: bool) -> None:
    """Raise if n would be wrong: frozen by `torch.jit.trace`, or counted over the local part of the keys only."""
    if policy.uniform is not None or torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        raise BackendError(
            f"policy {policy!r} is not supported by torch.jit.trace, which would bake in the β of this length; use "
            "torch.export or torch.compile"
        )
    if not known:
        refuse_context_parallel(query, "use attnscale.distributed.context_parallel_attention, or pass n as visible=")


def check_beta(beta: Tensor, query: Tensor) -> Tensor:
    """Return β as [B|1, H|1, Tq], in fp32 unless both policy and query are fp64; raise if it does not broadcast.

    In a compiled graph extents may be unknown until run time, where broadcasting itself is the check.
    """
    while beta.dim() < 3:
        beta = beta[None]
    if beta.dtype == torch.float64 != query.dtype:  # an fp64 policy in a model of another dtype
        beta = beta.to(torch.float32)
    batch, heads, rows = query.shape[:3]
    if torch.compiler.is_compiling():
        return beta
    if beta.shape[0] not in (1, batch) or beta.shape[1] not in (1, heads) or beta.shape[2] not in (1, rows):
        raise ArgumentError(
            f"β of shape {list(beta.shape)} from the policy is not accepted: expected a shape that broadcasts to "
            f"[B, H, Tq] = {[batch, heads, rows]}; the policy may be built for another number of heads (heads "
            "distributed over processes require attnscale.distributed.HeadParallel() in the plan of parallelize_module)"
        )
    return beta
