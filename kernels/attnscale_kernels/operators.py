"""How operators are registered with torch.library: in a namespace of the package that they are loaded as.

The HuggingFace Hub loads this package under names of its own, several versions in one process. In one namespace the
second would replace the operators of the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = re.sub(r"\W", "_", __name__.rpartition(".")[0])


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes an operator of a function, which changes none of its arguments."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)
