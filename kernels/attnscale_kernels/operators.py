"""Registration of operators with torch.library, their shared flat argument list, and the eager fast path.

The operator namespace is the name under which the package is imported. The HuggingFace Hub may load several versions
into one process under different names; in a common namespace the second would replace the operators of the first.
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
    """Decorator: register a function as an operator that mutates none of its arguments."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)


class FlatAttention(NamedTuple):
    """The arguments of an attention call as plain values, for operators and autograd.

    The schema of every operator is derived from these fields. Scores depend on the first `SCORES` fields only.
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
        """The visibility of keys."""
        return Visibility(*self[2:9])

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Visibility]:
        """Positional arguments of the launch functions."""
        return self.query, self.key, self.value, self.beta, self.visibility

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the launch functions."""
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
        """Flatten the arguments of an attention call."""
        return cls(query, key, *visibility, float(scale), softcap, value, beta, sinks, seed, float(dropout_p))

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple[FlatAttention, Sequence[Any]]:
        """Split the arguments of an operator into the leading attention arguments and the rest."""
        return cls(*arguments[: len(cls._fields)]), arguments[len(cls._fields) :]

    @classmethod
    def gradients(cls, **of_tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients in field order, given by field name; None for all other fields."""
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
# Fields that autograd saves as tensors.
TENSORS = tuple(name for name, kind in _TYPES.items() if kind.startswith("Tensor"))


def is_eager(*tensors: Tensor) -> bool:
    """Return True if a plain eager call is enough, that is, no operator is needed for these tensors.

    Dispatching an operator written in Python takes longer than the rest of a launch. Operators are needed for
    torch.compile, dispatch modes, torch.func transforms and tensor subclasses.

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
    """Return True if autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for x in tensors:  # any() over a generator takes twice as long
            if x.requires_grad:
                return True
    return False
