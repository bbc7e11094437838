"""State that outlives a call lives in `attnscale/_util/state.py`, and this is all of it.

It can hide in containers of modules and classes, in attributes that are set from outside on tensors, functions, classes
and modules, and in mutable default arguments. Caches of pure functions (`functools.cache`) are not counted: nothing can
tell whether they are there.
"""

from __future__ import annotations

import ast
import re
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
    "MEETINGS",
    "MODULE_CALLS",
    "FINDERS",
    "MODEL_PACKAGES",
    "FILE_NUMBERS",
    "HF_HOLDERS",
    "HF_KNOWN_CAUSALITY",
    "HF_COUNTED_MASKS",
    "HF_TOKEN_SHARDS",
    "HF_READ_LATER",
    "HF_RESUMED_TRAINER",
    "HF_SAVED_RECORD",
    "TRITON_OUTCOMES",
    "TRITON_CHECKING",
}

# Attributes that are set from outside, by the folder of those who do it, each with its reason.
ATTACHED = {
    "attention: scaled_dot_product_attention.replaces": "so that it does not call itself if assigned to torch",
    "backends: why_kernels_distrusted._dynamo_marked_constant": "a flag of torch's; its decorator would load dynamo",
    "attnscale_kernels: _open_transform._dynamo_marked_constant": "a flag of torch's; its decorator would load dynamo",
    "policies: per_head.PerHead.build_part": "`build` lies above `per_head`, which builds its parts by it",
    "policies: setattr(visible, COUNTED)": "marks an n that never changes, for as long as the tensor lives",
    "hf: setattr(config, NAME)": "the record of policies travels with the config; `release` removes it",
    "hf: setattr(top, _SAVED)": "what config.json is to name; `release` removes it",
    "hf: setattr(loaded, NAME)": "the record of policies travels with the Trainer's state",
    "hf: setattr(state, NAME)": "the record of policies travels with the Trainer's state",
    "_util: setattr(owner, name)": "wraps a method of transformers, peft or vLLM, once",
    "_util: setattr(wrapped, _WRAPPED)": "marks a wrapped method, so that it is wrapped once",
    "hf: setattr(owner, name)": "changes a module, with its undo",
    "serve: setattr(attention, _POSITIONS)": "the positions of a call, until it returns",
    "hf: setattr(rotary.owner, rotary.name)": "a factor of the model that a policy replaces, with its undo",
}  # fmt: skip

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
    return sorted(file for file in found if file not in (STATE, KERNEL_STATE))


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
    threads = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef) and "local" in map(last_name, node.bases)
    }
    for name, value, line in named_values(tree.body):
        if name in ("__all__", "__slots__"):
            continue
        constant = name.strip("_").isupper() and name not in changed
        is_table = isinstance(value, MUTABLE_LITERALS)
        if (is_table and not constant) or called(value) in MUTABLE_CALLS | threads:
            found.append(f"{where}:{line} {name} = {ast.unparse(value)[:60]}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{where}:{node.lineno} global {', '.join(node.names)}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            mutable = [x for x in defaults if isinstance(x, MUTABLE_LITERALS) or called(x) in MUTABLE_CALLS]
            found += [f"{where}:{x.lineno} default argument {ast.unparse(x)}" for x in mutable]
    return found


Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
METADATA = {"__name__", "__qualname__", "__module__", "__doc__", "__wrapped__"}
TENSOR_ATTRIBUTES = {"data", "grad", "requires_grad"}


def attached(tree: ast.Module) -> list[str]:
    """Attributes that are set on imported or defined names, on tensors, or by `setattr` on anything but `self`."""
    return list(_attached(tree, {}))


def _attached(scope: Scope, outer: dict[str, str]) -> Iterator[str]:
    names = {**outer, **bound_names(scope)}
    for node in own_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _attached(node, names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            if last_name(node.args[0]) != "self":
                yield f"setattr({', '.join(map(ast.unparse, node.args[:2]))})"
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            every = [leaf for target in targets for leaf in leaves(target)]
            yield from (ast.unparse(leaf) for leaf in every if is_attached(leaf, names))


def is_attached(target: ast.expr, names: dict[str, str]) -> bool:
    """Whether an assignment changes what a name stands for elsewhere too."""
    if isinstance(target, ast.Subscript):
        holder = target.value
        if isinstance(holder, ast.Call) and last_name(holder.func) in ("globals", "vars"):
            return not holder.args or last_name(holder.args[0]) != "self"
        return isinstance(holder, ast.Attribute) and holder.attr == "__dict__" and last_name(holder.value) != "self"
    if not isinstance(target, ast.Attribute) or target.attr in METADATA:
        return False
    root = target.value
    while isinstance(root, ast.Attribute):
        root = root.value
    name = getattr(root, "id", "")
    kind = names.get(name) if name != "state" else None  # what is in `state` may change
    if kind == "tensor":
        return root is target.value and target.attr not in TENSOR_ATTRIBUTES
    return kind == "definition"


def bound_names(scope: Scope) -> dict[str, str]:
    """What the names of a scope are: definitions (functions, classes, imports), tensors by their type, or values."""
    names: dict[str, str] = {}
    if not isinstance(scope, ast.Module):
        arguments = scope.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            tensor = one.annotation is not None and "Tensor" in re.findall(r"\w+", ast.unparse(one.annotation))
            names[one.arg] = "definition" if one.arg == "cls" else "tensor" if tensor else "value"
    for node in own_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = "definition"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name.partition(".")[0], "definition") for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = "value"
    return names


def own_nodes(scope: Scope) -> Iterator[ast.AST]:
    """The nodes of a scope without those inside the functions it defines; the bodies of classes belong to it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def leaves(target: ast.expr) -> list[ast.expr]:
    """The targets of an assignment to several."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [leaf for element in target.elts for leaf in leaves(element)]
    return [target]


def test_no_module_but_state_holds_mutable_state() -> None:
    found = []
    for file in files():
        root = next(root for root in ROOTS if file.is_relative_to(root))
        found += offences(ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(root.parent)))
    assert not found, "mutable state outside attnscale/_util/state.py:\n" + "\n".join(found)


def test_attributes_are_set_from_outside_only_where_listed() -> None:
    found = set()
    for file in (*files(), STATE, KERNEL_STATE):
        root = next(root for root in ROOTS if file.is_relative_to(root))
        part = root.name if root == ROOTS[1] else file.relative_to(root).with_suffix("").parts[0]
        found |= {f"{part}: {text}" for text in attached(ast.parse(file.read_text(encoding="utf-8")))}
    assert found <= set(ATTACHED), f"new state, to be justified and listed: {sorted(found - set(ATTACHED))}"
    assert found >= set(ATTACHED), f"gone, to be taken off the list: {sorted(set(ATTACHED) - found)}"


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
        "def f(x, seen={}): ...",
        "def f(x, *, seen=set()): ...",
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


@pytest.mark.parametrize(
    "source",
    [
        "def mark(visible: Tensor): setattr(visible, COUNTED, 1)",
        "def mark(visible: Tensor | None): visible.counted = 1",
        "import torch\ntorch.nn.functional.attention = 1",
        "from attnscale.policies import per_head\nper_head.PerHead.build_part = staticmethod(print)",
        "def attention(): ...\nattention.replaces = 1",
        "class A:\n    n = 0\n    def f(self): A.n += 1",
        "class A:\n    @classmethod\n    def f(cls): cls.n = 1",
        "def outer():\n    def inner(): ...\n    inner.calls, x = 0, 1",
        "def f(): globals()['seen'] = 1",
        "def f(module): vars(module)['seen'] = 1",
        "def f(module): module.__dict__['seen'] = 1",
        "def f(other): object.__setattr__(other, 'seen', 1)",
    ],
)
def test_an_attribute_from_outside_is_recognised(source: str) -> None:
    assert attached(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self): self.n = 1",
        "class A:\n    def f(self): object.__setattr__(self, 'n', 1)",
        "def f(x: Tensor): x.grad = None",
        "def outer():\n    def inner(): ...\n    inner.__name__ = 'other'\n    return inner",
        "from a import b\ndef f(b): b.x = 1",
        "from a import b\ndef f():\n    b = make()\n    b.x = 1",
    ],
)
def test_other_attributes_are_no_state(source: str) -> None:
    assert not attached(ast.parse(source))
