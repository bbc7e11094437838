"""What the forward of an attention class says, asked of one module of it: keywords it passes, whether it rotates."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

# The names under which modeling files look the attention function up, and call what they found.
REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"
CALLED: Final = "attention_interface"

UNKNOWN: Final = object()

# What a condition may refer to beside the module itself and still be answered without a forward.
_ANSWERABLE: Final = {"self": None, "getattr": getattr, "hasattr": hasattr, "isinstance": isinstance, "len": len}

_Test = tuple[ast.expr, bool]


@dataclass(frozen=True)
class Forward:
    """The forward of a class: keywords of its call of the interface, and the tests in front of each rotation."""

    text: str
    routed: bool
    keywords: Mapping[str, ast.expr]
    rotations: tuple[tuple[_Test, ...], ...]


def read_forward(kind: type[nn.Module]) -> Forward:
    """What the source of a class's forward says; nothing, where there is none."""
    return _read(kind.forward)


@functools.cache
def _read(function: Callable[..., Any]) -> Forward:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        body = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        return Forward("", False, {}, ())
    keywords: dict[str, ast.expr] = {}
    rotations: list[tuple[_Test, ...]] = []
    for call, tests in _calls(body, ()):
        name = _name(call.func)
        if name == CALLED:
            keywords |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        elif "rotary" in name or "rope" in name or "rotate" in name:
            rotations.append(tests)
    routed = REGISTRY in text or f"{CALLED}(" in text
    return Forward(text, routed, keywords, tuple(rotations))


def passed(module: nn.Module, keyword: str) -> Any:
    """What a module passes to the interface under a keyword: None where nothing, UNKNOWN where a forward decides."""
    given = read_forward(type(module)).keywords.get(keyword)
    return None if given is None else _ask(given, module)


def rotates(module: nn.Module) -> bool | None:
    """Whether a module rotates queries by their position; None where that depends on what its forward is given."""
    undecided = False
    for tests in read_forward(type(module)).rotations:
        answers = [_holds(test, wanted, module) for test, wanted in tests]
        if all(answers):
            return True
        undecided = undecided or False not in answers
    return None if undecided else False


def _calls(node: ast.AST, tests: tuple[_Test, ...]) -> Iterator[tuple[ast.Call, tuple[_Test, ...]]]:
    """Every call, with the tests of the `if`s around it and whether they have to be true."""
    if isinstance(node, ast.Call):
        yield node, tests
    if isinstance(node, (ast.If, ast.IfExp)):
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for statement in branch if isinstance(branch, list) else [branch]:
                yield from _calls(statement, (*tests, (node.test, wanted)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _holds(test: ast.expr, wanted: bool, module: nn.Module) -> bool | None:
    answer = _ask(test, module)
    return None if answer is UNKNOWN else bool(answer) is wanted


def _ask(expression: ast.expr, module: nn.Module) -> Any:
    """The value of an expression of a forward that refers to nothing but the module."""
    if any(isinstance(node, ast.Name) and node.id not in _ANSWERABLE for node in ast.walk(expression)):
        return UNKNOWN
    code = compile(ast.Expression(body=expression), "<forward>", "eval")
    try:
        return eval(code, {"__builtins__": {}}, {**_ANSWERABLE, "self": module})
    except Exception:
        return UNKNOWN  # an attribute that another class of the same name has
