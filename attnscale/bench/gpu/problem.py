"""One attention problem of the benchmark with its inputs, and the providers that are compared on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale.policies import build_policy


class Inputs(NamedTuple):
    """What a provider is given, and the gradient of its output for a backward pass."""

    query: Tensor  # [B, H, Tq, D]
    key: Tensor  # [B, Hkv, Tk, D]
    value: Tensor  # [B, Hkv, Tk, D]
    gradient: Tensor  # [B, H, Tq, D]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients are taken of."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class Problem:
    """Causal self-attention, or one query that sees a whole cache; `law` is the policy of providers that take one."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    law: str

    @property
    def causal(self) -> bool:
        """Whether row i sees i + 1 keys, and not all."""
        return self.queries == self.keys

    @property
    def label(self) -> str:
        """The configuration of a row."""
        dtype = str(self.dtype).removeprefix("torch.")
        rule = "causal" if self.causal else "all keys"
        return f"B={self.batch} H={self.heads} Hkv={self.kv_heads} D={self.dim} {dtype} {rule} law={self.law}"

    def shrunk(self, keys: int) -> Problem:
        """The same at another length, for checking numbers; where a sequence has one row, there are more of them."""
        return replace(self, batch=2 if self.causal else 4, queries=keys if self.causal else self.queries, keys=keys)

    def inputs(self, *, backward: bool) -> Inputs:
        """Random tensors from a fixed seed."""
        generator = torch.Generator(self.device).manual_seed(self.keys)
        rows, slots = (self.batch, self.heads, self.queries, self.dim), (self.batch, self.kv_heads, self.keys, self.dim)
        query, key, value, gradient = (
            torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            for shape in (rows, slots, slots, rows)
        )
        query, key, value = (x.requires_grad_(backward) for x in (query, key, value))
        return Inputs(query, key, value, gradient)

    def temperature(self) -> Tensor:
        """β [Tq] of the law, in fp32."""
        last = torch.arange(1, self.queries + 1, device=self.device)
        beta: Tensor = build_policy(self.law)(last if self.causal else torch.full_like(last, self.keys))
        return beta


class Answer(NamedTuple):
    """What a provider computes; `statistics` by the names of `RowStats`."""

    output: Tensor
    statistics: Mapping[str, Tensor] = MappingProxyType({})


class Attention(Protocol):
    """A function that is timed."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Answer: ...


def standard(problem: Problem, inputs: Inputs) -> Tensor:
    """β = 1, for providers without a temperature."""
    return torch.ones(problem.queries, device=problem.device)


def by_law(problem: Problem, inputs: Inputs) -> Tensor:
    """β of the problem's law."""
    return problem.temperature()


def always(problem: Problem, backward: bool) -> None:
    """For providers that always run."""


@dataclass(frozen=True)
class Provider:
    """A way to compute attention.

    `temperature` gives the β, broadcasting to [B, H, Tq], that its rows have; `bounds` what it may be at least and at
    most, where it is found and not given. What is not `ours` may be missing or fail, and is left out then; ours must
    work. `row_numbers` statistics are written for each row. One that `rounds_scores` to the dtype cannot be as exact
    as the others are in it: it is checked in fp32, and its error is the one found there.
    """

    name: str
    prepare: Callable[[Problem], Attention]
    temperature: Callable[[Problem, Inputs], Tensor] = standard
    bounds: Callable[[Problem, Inputs], tuple[Tensor, Tensor]] | None = None
    ours: bool = False
    row_numbers: int = 0
    rounds_scores: bool = False
    why_not: Callable[[Problem, bool], str | None] = always
