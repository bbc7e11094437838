"""Facts about an attention module that only the source of its class's forward tells, read without running it."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

# In modeling files: the registry of attention functions, and the variable that holds the function looked up there.
REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"
CALLED: Final = "attention_interface"

UNKNOWN: Final = object()

# Names that an expression may use, beside the module itself, and still be evaluated without a forward.
_EVALUABLE: Final = {"self": None, "getattr": getattr, "hasattr": hasattr, "isinstance": isinstance, "len": len}

_Test = tuple[ast.expr, bool]  # the test of an `if`, and whether it has to be true


@dataclass(frozen=True)
class Forward:
    """A forward: its text, the keywords it passes to the interface, and the tests around each of its rotations."""

    text: str
    routed: bool
    keywords: Mapping[str, ast.expr]
    rotations: tuple[tuple[_Test, ...], ...]


def read_forward(kind: type[nn.Module]) -> Forward:
    """The forward of a class; an empty one where there is no source."""
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
        name = str(getattr(call.func, "attr", None) or getattr(call.func, "id", ""))
        if name == CALLED:
            keywords |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        elif "rotary" in name or "rope" in name or "rotate" in name:
            rotations.append(tests)
    return Forward(text, REGISTRY in text or f"{CALLED}(" in text, keywords, tuple(rotations))


def passed_keyword(module: nn.Module, keyword: str) -> Any:
    """What a module passes to the interface under a keyword: None for nothing, UNKNOWN where only a forward knows."""
    given = read_forward(type(module)).keywords.get(keyword)
    return None if given is None else _evaluate(given, module)


def rotates_queries(module: nn.Module) -> bool | None:
    """Whether a module has a rotary embedding; None where that depends on the arguments of its forward."""
    undecided = False
    for tests in read_forward(type(module)).rotations:
        values = [(_evaluate(test, module), wanted) for test, wanted in tests]
        answers = [None if value is UNKNOWN else bool(value) is wanted for value, wanted in values]
        if all(answers):
            return True
        undecided = undecided or False not in answers
    return None if undecided else False


def _calls(node: ast.AST, tests: tuple[_Test, ...]) -> Iterator[tuple[ast.Call, tuple[_Test, ...]]]:
    """Every call, with the tests of the `if`s around it."""
    if isinstance(node, ast.Call):
        yield node, tests
    if isinstance(node, (ast.If, ast.IfExp)):
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            for statement in branch if isinstance(branch, list) else [branch]:
                yield from _calls(statement, (*tests, (node.test, wanted)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, tests)


def _evaluate(expression: ast.expr, module: nn.Module) -> Any:
    """The value of an expression that refers to nothing but the module, else UNKNOWN."""
    if any(isinstance(node, ast.Name) and node.id not in _EVALUABLE for node in ast.walk(expression)):
        return UNKNOWN
    code = compile(ast.Expression(body=expression), "<forward>", "eval")
    try:
        return eval(code, {"__builtins__": {}}, {**_EVALUABLE, "self": module})
    except Exception:
        return UNKNOWN  # for instance an attribute that this module lacks
