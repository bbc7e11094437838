"""Build the documentation site, and check that it needs no network: `python -m scripts.docs`.

Arguments replace those of mkdocs: `python -m scripts.docs serve` shows the site while you edit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from scripts.docs.sources import DOCS, ROOT

SITE = ROOT / "build/docs/site"
ENVIRONMENT = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme

# Attributes by which a page loads something when it is opened; a plain link (`<a href>`) loads nothing.
_LOADS = re.compile(r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=\"?(https?:)?//|<link\b[^>]*?\bhref=\"?(https?:)?//")
_STYLES = re.compile(r"@import\s+(?:url\()?[\"']?https?:|url\([\"']?https?:")


def remote_resources(site: Path) -> list[str]:
    """Files of the site that load something from another host."""
    pages = ((path, _LOADS) for path in sorted(site.rglob("*.html")))
    styles = ((path, _STYLES) for path in sorted(site.rglob("*.css")))
    found = [path for path, pattern in (*pages, *styles) if pattern.search(path.read_text(encoding="utf-8"))]
    return [path.relative_to(site).as_posix() for path in found]


def machine_paths(site: Path) -> list[str]:
    """Pages that contain a path of this machine, as warnings of a notebook cell do."""
    pages = sorted(site.rglob("*.html"))
    return [path.relative_to(site).as_posix() for path in pages if f"{ROOT}/" in path.read_text(encoding="utf-8")]


def main() -> int:
    """Run mkdocs, then the checks; the exit code is 0 if all succeed."""
    started = time.monotonic()
    command = [sys.executable, "-m", "mkdocs", *(sys.argv[1:] or ["build", "--strict", "--quiet"])]
    finished = subprocess.run([*command, "--config-file", f"{DOCS}/mkdocs.yml"], cwd=ROOT, env=ENVIRONMENT)
    if finished.returncode or sys.argv[1:]:
        return finished.returncode
    complaints = {
        "load from another host": remote_resources(SITE),
        "contain a path of this machine": machine_paths(SITE),
    }
    for complaint, files in complaints.items():
        if files:
            print(f"these files {complaint}: {', '.join(files)}", file=sys.stderr)
    if any(complaints.values()):
        return 1
    print(f"{SITE.relative_to(ROOT)}/index.html: built in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
