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

from attnscale_kernels.launch import Launch

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = (ROOT, ROOT / "tests", ROOT / "kernels")


class Parameter(NamedTuple):
    """A parameter of a compiled kernel: where its value is in the arguments of the launch, and its Triton type."""

    path: tuple[Any, ...]  # argument name, then indices into tuples
    type: str  # for example "*bf16", "i32", "fp32"
    divisible: bool  # the kernel is compiled for multiples of 16


class Kernel(NamedTuple):
    """A compiled kernel."""

    name: str
    target: str
    text: str  # PTX or AMD assembly
    shared: int  # bytes per block
    warps: int
    parameters: tuple[Parameter, ...]


class Argument(NamedTuple):
    """The value of a parameter; a pointer is the address of a tensor in this process."""

    name: str
    type: str
    value: int | float


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
    return Kernel(**{**fields, "parameters": tuple(parameters)})


def parameters_of(signature: dict[str, Any], attributes: dict[tuple[int, ...], Any]) -> Iterator[Parameter]:
    """The parameters that a kernel keeps. None, constexprs and integers equal to 1 are compiled in."""

    def visit(path: tuple[Any, ...], place: tuple[int, ...], kind: Any) -> Iterator[Parameter]:
        if isinstance(kind, (tuple, list)):
            for index, part in enumerate(kind):
                yield from visit((*path, index), (*place, index), part)
        elif kind != "constexpr":
            divisible = ["tt.divisibility", 16] in [list(x) for x in attributes.get(place, [])]
            yield Parameter(path, kind, divisible)

    for index, (name, kind) in enumerate(signature.items()):
        yield from visit((name,), (index,), kind)


def arguments_of(launch: Launch, kernel: Kernel) -> list[Argument]:
    """The arguments of a launch in the order of the compiled parameters."""
    return [_argument(launch, parameter) for parameter in kernel.parameters]


def _argument(launch: Launch, parameter: Parameter) -> Argument:
    value: Any = launch.arguments[parameter.path[0]]
    for index in parameter.path[1:]:
        value = value[index]
    name = ".".join(map(str, parameter.path))
    if isinstance(value, Tensor) != parameter.type.startswith("*"):
        raise ValueError(f"{name} is {value!r}, but the kernel takes {parameter.type}")
    number = value.data_ptr() if isinstance(value, Tensor) else value
    if parameter.divisible and number % 16:
        raise ValueError(f"{name} is {number}, but the kernel is compiled for multiples of 16")
    return Argument(name, parameter.type, number)
