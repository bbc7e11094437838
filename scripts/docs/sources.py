"""The pages of the site and their sources in the repository.

READMEs, CONTRIBUTING.md and CHANGELOG.md keep their path, so that `nav` of mkdocs.yml lists repository paths. Files of
`scripts/docs/pages` are addressed from that folder, notebooks as `notebooks/NAME.md`.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "scripts/docs"
PAGES = f"{DOCS}/pages"
NOTEBOOKS = f"{DOCS}/notebooks"

# The folders whose READMEs become pages.
FOLDERS = ("attnscale", "kernels", "scripts")


def find_pages(root: Path = ROOT) -> dict[str, str]:
    """Repository path → path of the page inside the site's sources.

    >>> find_pages()["attnscale/policies/README.md"], find_pages()["scripts/docs/pages/guide.md"]
    ('attnscale/policies/README.md', 'guide.md')
    """
    pages = {name: name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if (root / name).exists()}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("README.md")):
            name = path.relative_to(root).as_posix()
            pages[name] = name
    for path in sorted((root / PAGES).rglob("*.md")):
        pages[path.relative_to(root).as_posix()] = path.relative_to(root / PAGES).as_posix()
    for path in sorted((root / NOTEBOOKS).glob("*.ipynb")):
        pages[path.relative_to(root).as_posix()] = f"notebooks/{path.stem}.md"
    return pages


def homepage(root: Path = ROOT) -> str:
    """The address of the repository, from pyproject.toml.

    >>> homepage()
    'https://github.com/attnscale/attnscale'
    """
    found = re.search(r'^Homepage = "(.*)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError('pyproject.toml has no line Homepage = "..."')
    return found[1].rstrip("/")
