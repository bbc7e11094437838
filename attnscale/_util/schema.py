"""Operator schemas generated from the type hints of records."""

from __future__ import annotations

from typing import Literal, get_args, get_origin, get_type_hints

from torch import Tensor

_TYPES = {
    Tensor: "Tensor",
    int: "SymInt",
    bool: "bool",
    float: "float",
    str: "str",
    tuple[float, ...]: "float[]",
}


def operator_schema(record: type) -> str:
    """Return the fields of a NamedTuple or dataclass as operator arguments, in order.

    >>> from typing import NamedTuple
    >>> class Numbers(NamedTuple):
    ...     scale: float
    ...     cap: int | None
    >>> operator_schema(Numbers)
    'float scale, SymInt? cap'
    """
    return ", ".join(f"{_type(hint)} {name}" for name, hint in get_type_hints(record).items())


def _type(hint: object) -> str:
    options = [option for option in get_args(hint) if option is not type(None)]
    if type(None) in get_args(hint):
        return f"{_type(options[0])}?"
    if get_origin(hint) is Literal:
        return _TYPES[type(options[0])]
    return _TYPES[hint]  # type: ignore[index]
