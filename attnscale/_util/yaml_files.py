"""Reading and writing YAML configuration files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.errors import reject

# The configurations that come with the package. In a clone this is a link to the folder of that name.
PACKAGED = Path(__file__).parents[1] / "configs"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file, or in a configuration of the package where there is no such file.

    A configuration is named as in the repository, configs/policy/log.yaml, or in short, policy/log.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp(), "policy.yaml")
    >>> _ = file.write_text("name: log\\nreference_length: 2048\\n")
    >>> read_yaml(file)
    {'name': 'log', 'reference_length': 2048}
    """
    file = _find(Path(path))
    if not file.is_file():
        reject("path", str(path), "an existing YAML file, or a configuration of the package such as policy/log")
    yaml = need("yaml", "a YAML file", "cli")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reject("path", str(path), f"well-formed YAML ({error})")
    if not isinstance(content, dict):
        reject("path", str(path), f"a YAML mapping at the top level, not {type(content).__name__}")
    return content


def write_yaml(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as YAML, atomically."""
    write_whole(path, need("yaml", "a YAML file", "cli").safe_dump(dict(content), sort_keys=False))


def _find(path: Path) -> Path:
    """The file of the package that a path names, unless there is one at the path itself."""
    if path.is_file() or path.is_absolute():
        return path
    inside = PACKAGED.joinpath(*path.parts[path.parts[:1] == ("configs",) :])
    return inside if inside.suffix else inside.with_suffix(".yaml")
