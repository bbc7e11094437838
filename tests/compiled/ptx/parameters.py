"""The values of the parameters of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compiled.launching import Argument
from compiled.ptx.parse import Program, PtxError

# Addresses of maps: outside of every range of memory, so that only bulk copies can use them.
MAPS = 0x7A00_0000_0000_0000
MAP_SIZE = 128


def parameter_values(
    program: Program, arguments: Sequence[Argument]
) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Bits and size of each parameter, and the addresses of maps.

    Two pointers to scratch memory follow the arguments; they are 0. Maps have no bytes here, only an address.
    """
    sizes = {"u64": 64, "u32": 32, "f32": 32}
    if len(program.parameters) != len(arguments) + 2:
        raise PtxError(f"{len(program.parameters)} parameters for {len(arguments)} arguments")
    values: dict[str, tuple[int, int]] = {}
    maps: dict[str, int] = {}
    for index, (name, kind) in enumerate(program.parameters):
        given = arguments[index] if index < len(arguments) else None
        if (kind == "map") != (given is not None and given.type == "map"):
            raise PtxError(f"the parameter {name} is {kind}, but the argument is {given}")
        if kind == "map":
            maps[name] = MAPS + MAP_SIZE * len(maps)
            continue
        if kind not in sizes:
            raise PtxError(f"unknown parameter type {kind}")
        if given is None:
            values[name] = (0, sizes[kind])
            continue
        bits = {"i32": 32, "fp32": 32, "i64": 64}.get(given.type, 64 if given.type.startswith("*") else 0)
        if bits != sizes[kind] or (given.type == "fp32") != (kind == "f32"):
            raise PtxError(f"the parameter {name} is {kind}, but {given.name} is {given.type}")
        whole = int(np.float32(given.value).view(np.uint32)) if given.type == "fp32" else int(given.value)
        values[name] = (whole & ((1 << bits) - 1), bits)
    return values, maps
