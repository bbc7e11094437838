"""Execution of the few PTX instructions used by the kernels; Triton's interpreter does not support inline assembly.

The text is that of `tl.inline_asm_elementwise` for two numbers at once: `$0, $1` are the results, followed by two
numbers per argument. A 64-bit register is the pair of fp32 arrays packed into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray

INSTRUCTIONS: dict[str, Callable[..., Array]] = {
    "mul.rn.f32x2": lambda x, y: x * y,
    "add.rn.f32x2": lambda x, y: x + y,
    "fma.rn.f32x2": lambda x, y, z: (np.multiply(x, y, dtype=np.float64) + z).astype(np.float32),
}


class Results:
    """The result object that Triton expects from an operation."""

    def __init__(self, *handles: TensorHandle) -> None:
        self.handles = handles

    def get_result(self, index: int) -> TensorHandle:
        return self.handles[index]


def create_inline_asm(
    builder: InterpreterBuilder,
    text: str,
    constraints: str,
    values: list[TensorHandle],
    types: object,
    pure: bool,
    pack: int,
) -> Results:
    """The method missing in the interpreter's builder; all numbers are fp32."""
    if pack != 2 or any(value.data.dtype != np.float32 for value in values):
        raise NotImplementedError(f"assembly for {pack} numbers of {[value.dtype for value in values]}")
    if constraints != ",".join(["=r"] * 2 + ["r"] * 2 * len(values)):
        raise ValueError(f"constraints {constraints!r} are not those of two results and {2 * len(values)} numbers")
    numbers = [half for value in values for half in value.data.reshape(-1, 2).T]
    results = execute(text, numbers)
    return Results(TensorHandle(np.stack(results, axis=-1).reshape(values[0].data.shape), tl.float32))


def execute(text: str, numbers: list[Array]) -> tuple[Array, Array]:
    """Return `$0` and `$1` after executing a text with the operands `numbers`."""
    held = {f"${index + 2}": number for index, number in enumerate(numbers)}
    packed: dict[str, tuple[Array, ...]] = {}
    for statement in filter(
        None, (part.strip() for part in text.strip().removeprefix("{").removesuffix("}").split(";"))
    ):
        opcode, operands = statement.split(maxsplit=1)
        if opcode == ".reg":
            continue
        names = re.findall(r"\{[^}]*\}|[^\s,{}]+", operands)
        first, *others = (name.strip("{}").replace(" ", "").split(",") for name in names)
        if opcode == "mov.b64" and len(first) == 2:
            held |= dict(zip(first, packed[others[0][0]], strict=True))
        elif opcode == "mov.b64":
            packed[first[0]] = tuple(held[name] for name in others[0])
        else:
            sources = [packed[name] for (name,) in others]
            packed[first[0]] = tuple(INSTRUCTIONS[opcode](*of_each) for of_each in zip(*sources, strict=True))
    return held["$0"], held["$1"]
