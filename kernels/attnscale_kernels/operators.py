"""How operators are registered with torch.library, the one flat form of their arguments, and when none is needed.

Their namespace is that of the package that they are loaded as: the HuggingFace Hub loads it under names of its own,
several versions in one process, and in one namespace the second would replace the operators of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from .visibility import Visibility

ORDINARY = frozenset((Tensor, nn.Parameter))
NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0])


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes an operator of a function, which changes none of its arguments."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)


class FlatAttention(NamedTuple):
    """An attention as the plain values that operators take and autograd saves.

    The only list of them: the schema of every operator is made from it. Scores depend on the first `SCORES` of them.
    """

    query: Tensor
    key: Tensor
    slot: int
    left: int | None
    right: int | None
    start: Tensor | None
    stop: Tensor | None
    padding: Tensor | None
    mask: Tensor | None
    scale: float
    softcap: float | None
    value: Tensor
    beta: Tensor
    sinks: Tensor | None
    seed: Tensor | None
    dropout_p: float

    @property
    def visibility(self) -> Visibility:
        """Which keys rows may see."""
        return Visibility(*self[2:9])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Visibility]:
        """What launches are given in order."""
        return self.query, self.key, self.value, self.beta, self.visibility

    @property
    def options(self) -> dict[str, Any]:
        """What launches are given by name."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout_p,
            "seed": self.seed,
        }

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        visibility: Visibility,
        sinks: Tensor | None = None,
        seed: Tensor | None = None,
        *,
        scale: float,
        softcap: float | None,
        dropout_p: float = 0.0,
    ) -> FlatAttention:
        """The flat form of an attention."""
        return cls(query, key, *visibility, float(scale), softcap, value, beta, sinks, seed, float(dropout_p))

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple[FlatAttention, Sequence[Any]]:
        """The attention with which the arguments of an operator begin, and the others."""
        return cls(*arguments[: len(cls._fields)]), arguments[len(cls._fields) :]

    @classmethod
    def gradients(cls, **of_tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """What the backward of an operator returns for its attention: the gradients of some tensors, by name."""
        return tuple(of_tensors.get(name) for name in cls._fields)


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
}
_TYPES = {name: _SCHEMA_TYPES[hint] for name, hint in get_type_hints(FlatAttention).items()}
_ARGUMENTS = [f"{kind} {name}" for name, kind in _TYPES.items()]
SCORES = FlatAttention._fields.index("value")
FLAT_SCORES = ", ".join(_ARGUMENTS[:SCORES])
FLAT_ATTENTION = ", ".join(_ARGUMENTS)
# The fields that autograd saves as tensors.
TENSORS = tuple(name for name, kind in _TYPES.items() if kind.startswith("Tensor"))


def is_eager(*tensors: Tensor) -> bool:
    """Whether only autograd observes what is computed with these, which are tensors: then no operator is needed.

    torch's dispatcher takes an operator that is written in Python through several layers, which take longer than all
    the rest of a launch. torch.compile, modes, transforms and subclasses of tensors see operators only.

    >>> is_eager(torch.ones(2))
    True
    >>> torch.vmap(lambda x: (print(is_eager(x)), x)[1])(torch.ones(2))
    False
    tensor([1., 1.])
    """
    return (
        not torch.compiler.is_compiling()
        and _len_torch_dispatch_stack() == 0
        and maybe_current_level() is None
        and _get_tracing_state() is None
        and forward_ad._current_level < 0
        and ORDINARY.issuperset(map(type, tensors))
    )


def needs_gradient(*tensors: Tensor) -> bool:
    """Whether autograd is to record a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:  # `any` of a generator takes twice as long
            if x.requires_grad:
                return True
    return False
