"""How operators are registered with torch.library, and when they are not needed.

Their namespace is that of the package that they are loaded as: the HuggingFace Hub loads it under names of its own,
several versions in one process, and in one namespace the second would replace the operators of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

ORDINARY = frozenset((Tensor, nn.Parameter))
NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0])


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes an operator of a function, which changes none of its arguments."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)


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
