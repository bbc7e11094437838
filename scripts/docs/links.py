"""Repository links → links of the site. A link whose target does not exist raises `DeadLinkError`.

A link to a README or page leads to its page, a picture is copied into the site, and any other file or folder leads to
GitHub. Links inside code are unchanged.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from scripts.docs.sources import ROOT, find_pages, homepage

PICTURES = (".png", ".svg", ".jpg", ".gif")

# Parts of Markdown. The text of a link may hold code and one level of brackets. In `_TOKEN` code comes first, so that
# links inside it are not matched.
FENCE = r"^[ ]*(?P<fence>```+|~~~+).*?^[ ]*(?P=fence)[ ]*$"
CODE = r"(?P<ticks>`+)(?:(?!`).|\n(?!\n))+?(?P=ticks)(?!`)"
LINK = r"(?P<bang>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)(?P<title>\s+\"[^\"]*\")?\)"
_TOKEN = re.compile(f"{FENCE}|{CODE}|{LINK}", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)? *$", re.MULTILINE)


class DeadLinkError(Exception):
    """A link to a file or heading that does not exist."""


def slugify(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it; mkdocs is configured with the same function.

    >>> slugify("2.1 Length laws and `gap_adaptive`"), slugify("What n is"), slugify("Accumulation scale Λ")
    ('21-length-laws-and-gap_adaptive', 'what-n-is', 'accumulation-scale-λ')
    """
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def anchors_of(markdown: str) -> set[str]:
    """The anchors of all headings outside of code."""
    text = re.sub(FENCE, "", markdown, flags=re.MULTILINE | re.DOTALL)
    return {slugify(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in _HEADING.findall(text)}


@dataclass
class Links:
    """Rewrites the links of pages, and collects the pictures they show.

    Args:
        root: the repository.
        pages: repository path → path inside the site's sources (`sources.find_pages`).
        pictures: repository path → path inside the site's sources; filled while pages are rewritten.
    """

    root: Path = ROOT
    pages: Mapping[str, str] = field(default_factory=find_pages)
    pictures: dict[str, str] = field(default_factory=dict)

    def rewrite(self, markdown: str, source: str) -> str:
        """The text of the page at this repository path, with links of the site.

        Raises:
            DeadLinkError: lists all dead links of the page.
        """
        dead: list[str] = []
        changed = self._rewrite(markdown, source, dead)
        if dead:
            raise DeadLinkError(f"{source}: " + "; ".join(dead))
        return changed

    def _rewrite(self, markdown: str, source: str, dead: list[str]) -> str:
        def replace(token: re.Match[str]) -> str:
            if token["target"] is None:
                return token[0]
            text = self._rewrite(token["text"], source, dead)
            try:
                target = self._resolve(token["target"], source, picture=bool(token["bang"]))
            except DeadLinkError as error:
                dead.append(str(error))
                target = token["target"]
            return f"{token['bang']}[{text}]({target}{token['title'] or ''})"

        return _TOKEN.sub(replace, markdown)

    def _resolve(self, target: str, source: str, picture: bool) -> str:
        if re.match(r"[a-z]+:", target):
            return target
        path, _, anchor = target.partition("#")
        named = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(path))) if path else source
        if named.startswith("..") or not (self.root / named).exists():
            raise DeadLinkError(f"{target} leads to {named}, which does not exist")
        page = next((name for name in (named, posixpath.join(named, "README.md")) if name in self.pages), None)
        if page is not None:
            if anchor and unquote(anchor) not in self._anchors(page):
                raise DeadLinkError(f"{target} leads to {page}, which has no heading #{unquote(anchor)}")
            return (self._relative(self.pages[page], source) if path else "") + (f"#{anchor}" if anchor else "")
        if picture or named.endswith(PICTURES):
            self.pictures[named] = f"assets/pictures/{posixpath.basename(named)}"
            return self._relative(self.pictures[named], source)
        kind = "tree" if (self.root / named).is_dir() else "blob"
        return f"{self.repository}/{kind}/main/{named}" + (f"#{anchor}" if anchor else "")

    def _relative(self, target: str, source: str) -> str:
        return posixpath.relpath(target, posixpath.dirname(self.pages[source]) or ".")

    def _anchors(self, page: str) -> set[str]:
        return anchors_of(read_page(self.root / page))

    @cached_property
    def repository(self) -> str:
        """The address of the repository."""
        return homepage(self.root)


def read_page(path: Path) -> str:
    """The Markdown of a page; of a notebook, that of its text cells."""
    text = path.read_text(encoding="utf-8")
    return "\n\n".join(text_cells(json.loads(text))) if path.suffix == ".ipynb" else text


def text_cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    """The Markdown cells of a notebook."""
    return ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
