"""The C core of the executor: its constants and the C code of the rules."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from compiled.memory import NUMBERS
from compiled.native import build

from .decode import ELEMENTS, EXEC, M0, VCC, Condition, Flag, Handler, Kind, Row, Select
from .rules import NUMBER, SCALAR, VECTOR, Rule

HERE = Path(__file__).parent
SOURCES = tuple(HERE / name for name in ("arithmetic.h", "../memory.h", "../asynchronous.h", "../trace.h", "core.c"))

_READ = {
    "u32": "u32 {0} = ((const u32 *){1})[l]", "i32": "i32 {0} = ((const i32 *){1})[l]",
    "f32": "f32 {0} = ((const f32 *){1})[l]", "u64": "u64 {0} = ((const u64 *){1})[l]",
    "i64": "i64 {0} = ((const i64 *){1})[l]", "f64": "f64 {0} = ((const f64 *){1})[l]",
    "u16": "u32 {0} = ((const u32 *){1})[l] & 0xffff", "i16": "i32 {0} = (int16_t)((const u32 *){1})[l]",
    "f16": "f32 {0} = half_of(((const u32 *){1})[l])",
}  # fmt: skip
_WRITTEN = {
    "u32": "((u32 *)D)[l] = (u32)({})", "i32": "((u32 *)D)[l] = (u32)({})", "f32": "((u32 *)D)[l] = result32({})",
    "u64": "((u64 *)D)[l] = (u64)({})", "i64": "((u64 *)D)[l] = (u64)({})", "f64": "((u64 *)D)[l] = result64({})",
    "u16": "((u32 *)D)[l] = ({}) & 0xffff", "i16": "((u32 *)D)[l] = (u32)({}) & 0xffff",
    "f16": "((u32 *)D)[l] = result16((f32)({}))", "mask": "flags |= (u64)(({}) != 0) << l",
}  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built core, or None without a C compiler."""
    return build(_definitions(), _generated(), *(source.read_text() for source in SOURCES))


def _definitions() -> Iterator[tuple[str, int]]:
    yield from NUMBERS.items()
    yield from (("VCC", VCC), ("M0", M0), ("EXEC", EXEC))
    yield from ((f"H_{handler.name}", handler.value) for handler in Handler)
    yield from ((name.upper(), index) for index, name in enumerate(ELEMENTS))
    for names in (Kind, Select, Flag, Condition):
        yield from ((member.name, member.value) for member in names)
    yield from ((row.name, row.value) for row in Row if row)


def _generated() -> str:
    vector = "\n".join(_vector(rule) for rule in VECTOR.values())
    scalar = "\n".join(_scalar(rule) for rule in SCALAR.values())
    return f"""
static void apply(int rule, const void *A, const void *B, const void *C, u64 mask, void *D, u64 *found) {{
    u64 flags = 0;
    switch (rule) {{
{vector}
    }}
    *found = flags;
}}

static u64 apply_scalar(int rule, u64 A, u64 B, i32 *scc) {{
    i32 m = *scc;
    switch (rule) {{
{scalar}
    }}
    return 0;
}}
"""


def _vector(rule: Rule) -> str:
    steps = [_READ[type_].format(*names) for type_, names in zip(rule.sources, ("aA", "bB", "cC"), strict=False)]
    if rule.mask:
        steps.append("i32 m = mask >> l & 1")
    steps.append(_WRITTEN[rule.result].format(rule.value))
    if rule.flag:
        steps.append(f"flags |= (u64)(({rule.flag}) != 0) << l")
    return f"    case {NUMBER[rule.name]}: for (int l = 0; l < LANES; l++) {{ {'; '.join(steps)}; }} break;"


def _scalar(rule: Rule) -> str:
    types = ["u32" if type_ == "old" else type_ for type_ in rule.sources]
    steps = [f"{type_} {name.lower()} = ({type_}){name}" for type_, name in zip(types, "AB", strict=False)]
    result = rule.result if rule.result != "none" else types[0]
    steps.append(f"{result} d = {rule.value}")
    if rule.flag:
        steps.append(f"*scc = ({rule.flag}) != 0")
    unsigned = "u64" if result.endswith("64") else "u32"
    return f"    case {NUMBER[rule.name]}: {{ {'; '.join(steps)}; return ({unsigned})d; }}"
