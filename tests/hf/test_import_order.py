"""Imports inside `attnscale.hf` follow the order in its README, lazy imports included."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import attnscale

FOLDER = Path(attnscale.__file__).parent / "hf"


def imported_by(file: Path) -> set[str]:
    """The files of the folder that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnscale.hf"):
            own = node.module.removeprefix("attnscale.hf").lstrip(".")
            found |= {own} if own else {alias.name for alias in node.names}
    return found


def test_files_import_only_from_the_left_of_them():
    (drawn,) = re.findall(r"```\n(attnscale → .*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    groups = [re.findall(r"\w+", group) for group in drawn.split("→")]
    rank = {name: number for number, group in enumerate(groups) for name in group}
    files = {file.stem: imported_by(file) for file in FOLDER.glob("*.py") if file.stem != "__init__"}
    assert set(files) == set(rank) - {"attnscale"}
    assert not [(name, other) for name, others in files.items() for other in others if rank[other] >= rank[name]]
