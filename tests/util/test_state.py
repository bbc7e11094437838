"""Module-level mutable state lives in `attnscale/_util/state.py`, and this is all of it.

Caches of pure functions (`functools.cache`) are not counted: nothing can tell whether they are there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnscale
import attnscale_kernels
from attnscale._util import state

ROOTS = tuple(Path(package.__file__).parent for package in (attnscale, attnscale_kernels))
STATE = Path(state.__file__)
KERNEL_STATE = ROOTS[1] / "state.py"  # that package imports nothing of the other

LISTED = {
    "SCRATCH",
    "SAMPLED_ROWS",
    "BETAS",
    "COUNT_NUMBERS",
    "ESTIMATE_NUMBERS",
    "REGISTERED_POLICIES",
    "TORCH_REPLACED",
    "CLOSED_FUSED_PATHS",
    "TAPS",
    "TAP_NUMBERS",
    "FINDERS",
    "MODEL_PACKAGES",
    "FILE_NUMBERS",
    "HF_HOLDERS",
    "HF_KNOWN_CAUSALITY",
    "HF_COUNTED_MASKS",
    "HF_TOKEN_SHARDS",
    "HF_RESUMED_TRAINER",
    "HF_SAVED_RECORD",
    "TRITON_OUTCOMES",
    "TRITON_CHECKING",
}

# Calls whose result can change after the import.
MUTABLE_CALLS = {
    "dict", "list", "set", "bytearray", "OrderedDict", "defaultdict", "deque", "Counter", "ChainMap", "count", "cycle",
    "local", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "Memory", "Lock", "RLock", "Queue",
}  # fmt: skip
MUTABLE_LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
MUTATING_METHODS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "sort", "update",
}  # fmt: skip


def files() -> list[Path]:
    found = (file for root in ROOTS for file in root.rglob("*.py"))
    return sorted(file for file in found if "bench" not in file.parts and file not in (STATE, KERNEL_STATE))


def named_values(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr, int]]:
    """Assignments of a module and of its classes, which live as long as the process."""
    for node in body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value, node.lineno
        elif isinstance(node, ast.ClassDef):
            yield from named_values(node.body)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from named_values([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def called(value: ast.expr) -> str | None:
    """The last name of what is called: `itertools.count()` and `Memory[Any](8)` are `count` and `Memory`."""
    if not isinstance(value, ast.Call):
        return None
    function = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def changed_names(tree: ast.Module) -> set[str]:
    """Names whose value some code of the file changes: by a method, an item, an augmented assignment or `global`."""
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
            changed.add(last_name(node.func.value))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            changed.update(last_name(target.value) for target in targets if isinstance(target, ast.Subscript))
        if isinstance(node, ast.Global):
            changed.update(node.names)
    return changed - {None}


def last_name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def offences(tree: ast.Module, where: str) -> list[str]:
    """Mutable values that outlive a call; a table in capitals that nothing in its file changes is a constant."""
    found, changed = [], changed_names(tree)
    instances: set[str] = set()
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        if any(last_name(base) == "local" for base in node.bases):
            instances.add(name)
    for name, value, line in named_values(tree.body):
        if name in ("__all__", "__slots__"):
            continue
        constant = name.strip("_").isupper() and name not in changed
        is_table = isinstance(value, MUTABLE_LITERALS)
        if (is_table and not constant) or called(value) in MUTABLE_CALLS | instances:
            found.append(f"{where}:{line} {name} = {ast.unparse(value)[:60]}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{where}:{node.lineno} global {', '.join(node.names)}")
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            found += [
                f"{where}:{node.lineno} changes the class attribute {ast.unparse(target)}"
                for target in targets
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) in classes
            ]
    return found


def test_no_module_but_state_holds_mutable_state() -> None:
    found = []
    for file in files():
        root = next(root for root in ROOTS if file.is_relative_to(root))
        found += offences(ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(root.parent)))
    assert not found, "mutable state outside attnscale/_util/state.py:\n" + "\n".join(found)


def test_state_is_what_is_listed_here() -> None:
    names = {name for name, _, _ in named_values(ast.parse(STATE.read_text(encoding="utf-8")).body)}
    assert names <= LISTED, f"new state, to be justified and listed: {sorted(names - LISTED)}"
    assert names >= LISTED, f"gone, to be taken off the list: {sorted(LISTED - names)}"


def test_state_of_the_kernels_is_what_is_listed_here() -> None:
    tree = ast.parse(KERNEL_STATE.read_text(encoding="utf-8"))
    assert [name for name, _, _ in named_values(tree.body)] == ["LAUNCHES"]


def test_every_state_names_the_modules_that_use_it() -> None:
    source = STATE.read_text(encoding="utf-8")
    for name, _, line in named_values(ast.parse(source).body):
        comment = source.splitlines()[line - 1].partition("#")[2]
        owners = [owner.strip() for owner in comment.partition(":")[0].split(",")]
        expected = {STATE.parents[1] / Path(*owner.split(".")).with_suffix(".py") for owner in owners}
        users = {file for file in files() if f"state.{name}" in file.read_text(encoding="utf-8")}
        assert users == expected, f"{name} is said to be used by {owners}, but is by {sorted(map(str, users))}"


@pytest.mark.parametrize(
    "source",
    [
        "seen = {}",
        "TABLE = []\ndef f(): TABLE.append(1)",
        "MEMORY: Memory[int] = Memory(most=8)",
        "import itertools\nNUMBERS = itertools.count()",
        "class A:\n    all = {}",
        "class A:\n    n = 0\n    def f(self): A.n += 1",
        "class M(threading.local): ...\nmemory = M()",
        "last = None\ndef f():\n    global last\n    last = 1",
    ],
)
def test_state_is_recognised(source: str) -> None:
    assert offences(ast.parse(source), "example.py")


@pytest.mark.parametrize(
    "source", ['NAMES = {"a": 1}', "ORDER = ('a', 'b')", "T = TypeVar('T')", "TABLE = MappingProxyType({})"]
)
def test_constants_are_no_state(source: str) -> None:
    assert not offences(ast.parse(source), "example.py")
