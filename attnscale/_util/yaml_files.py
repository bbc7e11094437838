"""Reading and writing YAML configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from attnscale._util.files import write_whole
from attnscale.errors import MissingDependencyError, reject


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "policy.yaml")
    >>> _ = file.write_text("name: log\\nreference_length: 2048\\n")
    >>> read_yaml(file)
    {'name': 'log', 'reference_length': 2048}
    """
    path = Path(path)
    if not path.is_file():
        reject("path", str(path), "an existing YAML file")
    yaml = _yaml()
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reject("path", str(path), f"well-formed YAML ({error})")
    if not isinstance(content, dict):
        reject("path", str(path), f"a YAML mapping at the top level, not {type(content).__name__}")
    return content


def write_yaml(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as YAML, atomically."""
    write_whole(path, _yaml().safe_dump(dict(content), sort_keys=False))


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError as error:
        raise MissingDependencyError("YAML files need PyYAML: pip install 'attnscale[cli]'") from error
    return yaml
