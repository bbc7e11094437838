"""Imports go one way: a folder of the package imports only from those below it, lazily or not."""

from __future__ import annotations

import ast
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
    ("hf",),
    ("theory", "lab"),
    ("report",),
    ("bench",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Upward imports that stay, each with its reason; all of them lazy.
EXCEPTIONS: dict[tuple[str, str], str] = {}

BACKENDS = ("sdpa", "triton", "reference", "blockwise.backend")


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module or object of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str | None:
    """The folder or top-level module that a name of the package is in; None for the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "attnscale" and len(parts) > 1 and parts[1] in LEVEL else None


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_layers(file: Path) -> None:
    inside = file.relative_to(PACKAGE).with_suffix("").parts
    if inside == ("__init__",):
        return  # the public names come from every layer
    assert inside[0] in LEVEL, f"{inside[0]} has no layer: add it to LAYERS"
    wrong = []
    for line, name in imported(file):
        part = part_of(name)
        if part is None or part == inside[0] or (".".join(inside), name) in EXCEPTIONS:
            continue
        if LEVEL[part] >= LEVEL[inside[0]]:
            wrong.append(f"{'/'.join(inside)}.py:{line} imports {name}, which is not below {inside[0]}")
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_needed() -> None:
    for importer, name in EXCEPTIONS:
        file = PACKAGE.joinpath(*importer.split(".")).with_suffix(".py")
        assert name in {found for _, found in imported(file)}, f"{importer} no longer imports {name}"


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
    siblings = [f"attnscale.backends.{name.removesuffix('.backend')}" for name in BACKENDS if name != backend]
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
    """The module that an imported name is, or is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None
