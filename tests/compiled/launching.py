"""What the compiler makes of the launches of a case, and the arguments that such a kernel takes.

Triton chooses between compiler and interpreter when it is imported, so compilation runs in a process of its own. It
builds the launches of a case again and writes the text of each kernel to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscale_kernels.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = (ROOT, ROOT / "tests", ROOT / "kernels")


class Parameter(NamedTuple):
    """A parameter of a compiled kernel: where its value is in the arguments of the launch, and its Triton type."""

    path: tuple[Any, ...]  # argument name, then indices into tuples and names of attributes
    type: str  # for example "*bf16", "i32", "fp32", or "map" for the map of a tensor descriptor
    divisible: bool  # the kernel is compiled for multiples of 16


class Box(NamedTuple):
    """How the kernel copies the tensor of a descriptor to shared memory, as Triton tells the driver."""

    block: tuple[int, ...]  # elements of a copy by axis
    element: int  # bytes
    swizzle: int  # as in `CUtensorMapSwizzle`: none, 32, 64 or 128 bytes


class Kernel(NamedTuple):
    """A compiled kernel."""

    name: str
    target: str
    text: str  # PTX or AMD assembly
    shared: int  # bytes per block
    warps: int
    parameters: tuple[Parameter, ...]
    boxes: tuple[Box, ...] = ()  # of the parameters that are maps


class Map(NamedTuple):
    """A map for bulk copies: the tensor of a descriptor, and a box. The last axis comes first, as in PTX."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    box: tuple[int, ...]  # elements
    element: int  # bytes
    swizzle: int  # bytes of a row that is permuted; 0: none


class Argument(NamedTuple):
    """The value of a parameter; a pointer is the address of a tensor in this process."""

    name: str
    type: str
    value: int | float
    map: Map | None = None


def compile_cases(names: Sequence[str], target: str, cache: Path | None = None) -> dict[str, list[Kernel]]:
    """Compile the launches of cases for a target in a process without the interpreter.

    `cache` is Triton's compilation cache, by default that of the user.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, SEARCHED))
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.json"
        command = [sys.executable, "-m", "compiled.compiling", target, str(file), *names]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"compilation for {target} failed:\n{done.stderr}")
        found = json.loads(file.read_text())
    return {name: [kernel_of(fields) for fields in kernels] for name, kernels in found.items()}


def kernel_of(fields: dict[str, Any]) -> Kernel:
    """Read a kernel from JSON."""
    parameters = [Parameter(tuple(path), type, divisible) for path, type, divisible in fields["parameters"]]
    boxes = [Box(tuple(block), element, swizzle) for block, element, swizzle in fields["boxes"]]
    return Kernel(**{**fields, "parameters": tuple(parameters), "boxes": tuple(boxes)})


def parameters_of(signature: dict[str, Any], attributes: dict[tuple[int, ...], Any]) -> Iterator[Parameter]:
    """The parameters that a kernel keeps. None, constexprs and integers equal to 1 are compiled in.

    A tensor descriptor becomes a map, the shape and the strides, as in `expand_signature` of Triton's driver.
    """

    def visit(path: tuple[Any, ...], place: tuple[int, ...], kind: Any) -> Iterator[Parameter]:
        if isinstance(kind, (tuple, list)):
            for index, part in enumerate(kind):
                yield from visit((*path, index), (*place, index), part)
        elif kind.startswith("tensordesc<"):
            axes = range(kind.count(",") + 1)
            yield Parameter(path, "map", False)
            yield from (Parameter((*path, "shape", axis), "i32", False) for axis in axes)
            yield from (Parameter((*path, "strides", axis), "i64", False) for axis in axes)
        elif kind != "constexpr":
            divisible = ["tt.divisibility", 16] in [list(x) for x in attributes.get(place, [])]
            yield Parameter(path, kind, divisible)

    for index, (name, kind) in enumerate(signature.items()):
        yield from visit((name,), (index,), kind)


def arguments_of(launch: Launch, kernel: Kernel) -> list[Argument]:
    """The arguments of a launch in the order of the compiled parameters."""
    boxes = iter(kernel.boxes)
    found = [_argument(launch, parameter, boxes) for parameter in kernel.parameters]
    if next(boxes, None) is not None:
        raise ValueError("more boxes than descriptors")
    return found


def _argument(launch: Launch, parameter: Parameter, boxes: Iterator[Box]) -> Argument:
    value: Any = launch.arguments[parameter.path[0]]
    for index in parameter.path[1:]:
        value = getattr(value, index) if isinstance(index, str) else value[index]
    name = ".".join(map(str, parameter.path))
    if parameter.type == "map":
        return Argument(name, "map", 0, map_of(value, next(boxes)))
    if isinstance(value, Tensor) != parameter.type.startswith("*"):
        raise ValueError(f"{name} is {value!r}, but the kernel takes {parameter.type}")
    number = value.data_ptr() if isinstance(value, Tensor) else value
    if parameter.divisible and number % 16:
        raise ValueError(f"{name} is {number}, but the kernel is compiled for multiples of 16")
    return Argument(name, parameter.type, number)


def map_of(given: TensorDescriptor, box: Box) -> Map:
    """The map that the driver makes of a descriptor, with the conditions of `cuTensorMapEncodeTiled`."""
    x, width = given.base, (0, 32, 64, 128)[box.swizzle]
    made = Map(
        x.data_ptr(), tuple(given.shape[::-1]), tuple(stride * box.element for stride in given.strides[::-1]),
        box.block[::-1], box.element, width,
    )  # fmt: skip
    row = made.box[0] * made.element
    if x.element_size() != made.element or given.padding != "zero" or made.strides[0] != made.element:
        raise ValueError(f"unknown descriptor {given}")
    if made.address % 16 or any(not 0 < stride < 1 << 40 or stride % 16 for stride in made.strides[1:]):
        raise ValueError(f"a descriptor needs multiples of 16 bytes: {given}")
    if not len(made.shape) == len(made.strides) == len(made.box) or any(not 0 < size <= 256 for size in made.box):
        raise ValueError(f"a box of {box.block} for {given}")
    if row % 16 or (width and row != width):
        raise ValueError(f"a box with rows of {row} bytes and a swizzle of {width}")
    return made
