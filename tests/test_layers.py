"""Imports go one way: a folder of the package imports only from those below it.

Imports inside functions count, and so does a string that names a module of the package, wherever it stands: it may be
handed to `importlib`, directly or through a table.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnscale

PACKAGE = Path(attnscale.__file__).parent

# From the lowest to the highest. Parts in one tuple may import each other's lower neighbours, but not each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("_util",),
    ("call",),
    ("statistics",),
    ("policies",),
    ("backends",),
    ("softmax",),
    ("attention",),
    ("module",),
    ("convert", "patch_torch", "distributed"),
    ("diagnostics",),
    ("attention_loss",),
    ("hf",),
    ("theory", "lab", "serve"),
    ("report",),
    ("bench",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# The composition root: its public names come from every layer, and it tells lower layers which higher ones exist.
ROOT = ("__init__",)

BACKENDS = ("sdpa", "triton", "reference", "blockwise")


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module or object of the package that a file imports, or names in a string."""
    folder = ("attnscale", *file.relative_to(PACKAGE).parent.parts)
    return imports_of(ast.parse(file.read_text(encoding="utf-8")), folder)


def imports_of(tree: ast.Module, folder: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The imports of a module that lies in that folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) + 1 - node.level] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
            start = re.fullmatch(r"(attnscale(\.\w+)*)\.\w*", str(node.values[0].value))
            if start is not None:
                yield node.lineno, f"{start[1]}.*"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # as of an entry point
            if is_module(name) and name != ".".join(folder):  # its own folder is where it looks for files
                yield node.lineno, name


def is_module(name: str) -> bool:
    """Whether a dotted name is a module or folder of the package."""
    if not re.fullmatch(r"attnscale(\.\w+)+", name):
        return False
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def part_of(name: str) -> str | None:
    """The folder or top-level module that a name of the package is in; None for the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "attnscale" and len(parts) > 1 and parts[1] in LEVEL else None


def upward(found: Iterator[tuple[int, str]], own: str) -> list[str]:
    """The imports of a part of the package that do not go down, or may not."""
    wrong = []
    for line, name in found:
        part = part_of(name)
        if name == "attnscale.*" or (part is not None and part != own and LEVEL[part] >= LEVEL[own]):
            wrong.append(f"line {line} imports {name}, which is not below {own}")
    return wrong


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_layers(file: Path) -> None:
    inside = file.relative_to(PACKAGE).with_suffix("").parts
    if inside != ROOT:
        assert inside[0] in LEVEL, f"{inside[0]} has no layer: add it to LAYERS"
        assert upward(imported(file), inside[0]) == []


@pytest.mark.parametrize(
    "source",
    [
        "from attnscale.hf.monitoring import find_sites",
        "def find():\n    import attnscale.hf",
        "def find():\n    from ..hf import monitoring",
        "import importlib\nimportlib.import_module('attnscale.hf.monitoring')",
        "__import__('attnscale.hf')",
        "def find(name):\n    return importlib.import_module(f'attnscale.{name}')",
        "FINDERS = {'transformers': ('attnscale.hf:find_sites', 1)}",
        "from importlib import import_module as get\ndef find(name):\n    return get(f'attnscale.hf.{name}')",
    ],
)
def test_an_upward_import_is_found_however_it_is_written(source: str) -> None:
    assert upward(imports_of(ast.parse(textwrap.dedent(source)), ("attnscale", "diagnostics")), "diagnostics")


@pytest.mark.parametrize(
    "source",
    [
        "from attnscale.statistics import RowStats",
        "from .records import record",
        "raise ValueError('attnscale.hf.apply gives a model its policies')",
        "import_module(f'{__name__}.sinks')",
    ],
)
def test_other_imports_and_texts_are_accepted(source: str) -> None:
    assert not upward(imports_of(ast.parse(source), ("attnscale", "diagnostics")), "diagnostics")


def test_the_package_is_imported_by_its_parts_and_not_whole() -> None:
    above = {"lab", "report", "bench", "doctor", "cli", "__main__", "hf", "diagnostics"}
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in files()
        if file.relative_to(PACKAGE).with_suffix("").parts[0] not in above | {"__init__"}
        for line, name in imported(file)
        if name == "attnscale" or (name.startswith("attnscale.") and part_of(name) is None)
    ]
    assert not wrong, f"import from the module that defines the name: {wrong}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_backend_imports_a_sibling_not_even_through_what_they_share(backend: str) -> None:
    names = {module_name(file): file for file in files()}
    siblings = [f"attnscale.backends.{name}" for name in BACKENDS if name != backend]
    waiting, reached = [f"attnscale.backends.{backend}"], set()
    while waiting:
        module = waiting.pop()
        if module not in reached and module.startswith("attnscale.backends."):
            reached.add(module)
            waiting += [owner(found, names) or "" for _, found in imported(names[module])]
    wrong = sorted(name for name in reached if any(f"{name}.".startswith(f"{sibling}.") for sibling in siblings))
    assert not wrong, f"{backend} imports {wrong}"


def test_there_are_no_cycles_between_modules() -> None:
    names = {module_name(file): file for file in files()}
    edges = {name: {owner(found, names) for _, found in imported(file)} - {name, None} for name, file in names.items()}
    edges.pop("attnscale")
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' → '.join((*path[path.index(name) :], name))}"
        if name in done or name not in edges:
            return
        for other in sorted(edges[name]):
            visit(other, (*path, name))
        done.add(name)

    for name in sorted(edges):
        visit(name, ())


def module_name(file: Path) -> str:
    parts = ("attnscale", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def owner(name: str, modules: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is in; None where the name is put together when it is imported."""
    if name.endswith(".*"):
        return None
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None
