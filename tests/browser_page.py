"""A page opened in headless chromium, and its resulting DOM."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


class Dom(HTMLParser):
    """The DOM of a rendered page: elements with attributes, and the text of those with an id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: dict[str, str] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.elements.append((tag, found))
        if tag not in ("meta", "input", "br", "link"):
            self._open.append((tag, found.get("id")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name is not None:
                self.text[name] = self.text.get(name, "") + data

    def all(self, tag: str, kind: str = "") -> list[dict[str, str]]:
        return [found for name, found in self.elements if name == tag and kind in ("", *found.get("class", "").split())]

    def by_id(self, name: str) -> dict[str, str]:
        return next(found for _, found in self.elements if found.get("id") == name)


def opened(folder: Path, html: str, fragment: str = "", program: str = "", width: int = 1400) -> Dom:
    """The DOM of a page; an error in the page or its console fails the test."""
    path = folder / "page.html"
    path.write_text(html.replace("</body>", f"<script>{program}</script></body>"), encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    options += " --disable-component-update --enable-logging=stderr --v=0 --virtual-time-budget=20000 --dump-dom"
    command = [
        str(CHROMIUM),
        *options.split(),
        f"--window-size={width},1000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    finished = subprocess.run(
        [*command, f"{path.as_uri()}#{fragment}"], capture_output=True, encoding="utf-8", timeout=240
    )
    console = [line for line in finished.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    dom = Dom(finished.stdout)
    root = dom.all("html")[0]
    assert "data-errors" not in root, root["data-errors"]
    assert int(root["data-ready"]) > 0
    return dom


# Wait for the effect of each action, record what is shown, and store the records in the page.
NOTES = """
const notes = [], later = () => new Promise((done) => setTimeout(done, 0));
async function after(act) {
  const before = document.documentElement.dataset.ready;
  act();
  while (document.documentElement.dataset.ready === before) await later();
}
function keep() {
  const box = document.createElement("pre");
  box.id = "notes";
  box.textContent = JSON.stringify(notes);
  document.body.append(box);
}
"""


def notes(dom: Dom) -> Any:
    return json.loads(dom.text["notes"])
