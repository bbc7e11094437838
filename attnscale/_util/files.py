"""File helpers: atomic writes, CSV tables, YAML, and the cache folder."""

from __future__ import annotations

import csv
import io
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnscale._util.optional import need
from attnscale.errors import reject

OVERRIDE = "ATTNSCALE_CACHE_DIR"
# The configurations of the package. In a clone this is a symbolic link to `configs`.
PACKAGED = Path(__file__).parents[1] / "configs"


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file atomically: on failure an existing file is unchanged and no partial file remains.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "note.txt")
    >>> write_whole(target, "kept")
    >>> target.read_text()
    'kept'
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def cache_folder() -> Path:
    """Return the folder for reproducible files of this package; ATTNSCALE_CACHE_DIR overrides it.

    >>> os.environ["ATTNSCALE_CACHE_DIR"] = "/somewhere/else"
    >>> cache_folder().as_posix()
    '/somewhere/else'
    >>> del os.environ["ATTNSCALE_CACHE_DIR"]
    """
    chosen = os.environ.get(OVERRIDE)
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "attnscale"


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, atomically; floats have six digits, NaN is an empty cell.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp(), "table.csv")
    >>> write_table(target, ["n", "value"], [{"n": 2, "value": 1 / 3}, {"n": 4, "value": math.nan}])
    >>> target.read_text().split()
    ['n,value', '2,0.333333', '4,']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_written(row.get(column, "")) for column in columns] for row in rows)
    write_whole(path, text.getvalue())


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


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
    """Return the path if it exists, else the packaged configuration of that name."""
    if path.is_file() or path.is_absolute():
        return path
    inside = PACKAGED.joinpath(*path.parts[path.parts[:1] == ("configs",) :])
    return inside if inside.suffix else inside.with_suffix(".yaml")
