"""Notebooks: execute, keep the result until a source changes, convert to Markdown.

A cell that raises fails the build. Committed notebooks have no output.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.docs.sources import ROOT

TIMEOUT = 300  # seconds for one cell
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, where no notebook widgets are installed
}
_PICTURES = {"image/svg+xml": "svg", "image/png": "png"}


def execute_all(paths: Sequence[Path], kept: Path) -> list[dict[str, Any]]:
    """The notebooks with output, as nbformat JSON. A notebook is executed again if it, the package or a pin changed.

    Args:
        paths: notebooks without output.
        kept: folder of earlier results.
    """
    workers = min(len(paths), os.cpu_count() or 1) or 1
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda path: _executed(path, kept), paths))


def _executed(path: Path, kept: Path) -> dict[str, Any]:
    result = kept / f"{path.stem}-{_fingerprint(path)}.json"
    if not result.exists():
        notebook = execute(path.read_text(encoding="utf-8"), path.name)
        kept.mkdir(parents=True, exist_ok=True)
        for earlier in kept.glob(f"{path.stem}-*.json"):
            earlier.unlink()
        result.write_text(json.dumps(notebook), encoding="utf-8")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _fingerprint(path: Path) -> str:
    """A hash of everything that decides the output: the notebook, the package, the pinned versions, Python."""
    seen = hashlib.sha256(sys.version.encode())
    package = (file for file in sorted((ROOT / "attnscale").rglob("*")) if file.suffix in (".py", ".json", ".txt"))
    for file in (path, ROOT / "scripts/constraints.txt", *package):
        seen.update(file.read_bytes())
    return seen.hexdigest()[:16]


def execute(text: str, name: str) -> dict[str, Any]:
    """A notebook, given as JSON, with output. Its kernel runs with one thread in an empty folder.

    Raises:
        RuntimeError: a cell raised; the message has its traceback.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from traitlets.config import Config

    found: Any = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}  # in place of ports
        client = NotebookClient(
            found,
            kernel_name="python3",
            timeout=TIMEOUT,
            extra_arguments=["--InlineBackend.figure_formats=svg"],
            resources={"metadata": {"path": folder}},
            config=Config({"AsyncKernelManager": sockets}),
        )
        try:
            client.execute(env=os.environ | _ENVIRONMENT | {"PYTHONPATH": _search_path()})
        except CellExecutionError as error:
            raise RuntimeError(f"{name}: {_ANSI.sub('', str(error))}") from None
    return json.loads(nbformat.writes(found))  # type: ignore[no-any-return]


def _search_path() -> str:
    """The repository first: the kernel starts in another folder."""
    return os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def to_markdown(
    notebook: dict[str, Any], stem: str, rewrite: Callable[[str], str] = str
) -> tuple[str, dict[str, bytes]]:
    """The page of an executed notebook, and its pictures: path in the site → content.

    Args:
        notebook: as nbformat JSON.
        stem: its name without suffix; pictures are named after it.
        rewrite: applied to the text cells.

    >>> cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": "2"}}]}
    >>> print(to_markdown({"cells": [cell]}, "sums")[0])
    ```python
    1 + 1
    ```
    <BLANKLINE>
    ```{ .text .output .no-copy }
    2
    ```
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = _joined(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(rewrite(source))
        elif source:
            parts.append(f"```python\n{source}\n```")
            for output in _merged(cell["outputs"]):
                parts += _shown(output, stem, pictures)
    return "\n\n".join(parts), pictures


def _merged(outputs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Outputs with neighbouring pieces of one stream joined."""
    text = ""
    for output in outputs:
        if output.get("output_type") == "stream":
            text += _joined(output["text"])
            continue
        if text:
            yield {"data": {"text/plain": text}}
        text = ""
        yield output
    if text:
        yield {"data": {"text/plain": text}}


def _shown(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> Iterator[str]:
    data = output["data"]
    for kind, suffix in _PICTURES.items():
        if kind in data:
            content = _joined(data[kind])
            name = f"assets/notebooks/{stem}_{len(pictures) + 1}.{suffix}"
            pictures[name] = content.encode() if suffix == "svg" else base64.b64decode(content)
            yield f"![Output of the cell above](../{name}){{ .figure }}"
            return
    if "text/html" in data:
        html = re.sub(r"<style.*?</style>", "", _joined(data["text/html"]), flags=re.DOTALL)
        html = re.sub(r"\n\s*", "", html).replace(' border="1"', "")
        yield f'<div class="output-table">{html}</div>'
    else:
        text = _ANSI.sub("", _joined(data["text/plain"])).rstrip()
        yield f"```{{ .text .output .no-copy }}\n{text}\n```"


def _joined(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
