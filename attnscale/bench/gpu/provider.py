"""What is compared: a provider makes an attention function for a problem, and says which temperature it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnscale.bench.gpu.problem import Inputs, Problem


class Answer(NamedTuple):
    """What a provider computes; `statistics` by the names of `RowStats`."""

    output: Tensor
    statistics: Mapping[str, Tensor] = {}


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
