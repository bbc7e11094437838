"""The mkdocs hook: READMEs, notebooks, tables and plots become files of the site, and repository links its links.

mkdocs is imported inside of functions: pytest collects this module, and only `make docs` installs mkdocs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from scripts.docs import blocks, notebooks
from scripts.docs.links import DeadLinkError, Links, read_page
from scripts.docs.sources import ROOT
from scripts.docs.terms import GLOSSARY, link_terms

_made: dict[str, str] = {}  # name of a block → Markdown; filled by `on_files`


def on_files(files: Any, config: Any) -> Any:
    """Add every source that is not in `docs_dir`: READMEs, executed notebooks, pictures, plots."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    links = Links()
    texts = {source: read_page(ROOT / source) for source in links.pages}
    _check_links(links, texts)
    contents: dict[str, str | bytes] = {}
    for text in texts.values():
        for name in blocks.names_in(text):
            if name not in blocks.BLOCKS:
                raise PluginError(f"<!-- generated: {name} --> is not accepted: expected one of {list(blocks.BLOCKS)}")
            _made[name], pictures = blocks.BLOCKS[name]()
            contents |= pictures
    sources = [source for source in links.pages if source.endswith(".ipynb")]
    try:
        executed = notebooks.execute_all([ROOT / source for source in sources], Path(config.site_dir).parent / "kept")
    except RuntimeError as error:
        raise PluginError(str(error)) from None
    for source, notebook in zip(sources, executed, strict=True):
        rewrite = partial(links.rewrite, source=source)  # here, before the pictures of cells come in
        markdown, drawn = notebooks.to_markdown(notebook, Path(source).stem, rewrite)
        contents |= {links.pages[source]: markdown, **drawn}
    for uri, content in contents.items():
        files.append(File.generated(config, uri, content=content))
    beside = {source: uri for source, uri in links.pages.items() if source.endswith("README.md") or "/" not in source}
    for source, uri in {**beside, **links.pictures}.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    return files


def _check_links(links: Links, texts: dict[str, str]) -> None:
    """Rewrite every page once: finds all pictures, and all dead links at once."""
    from mkdocs.exceptions import PluginError

    dead = []
    for source, text in texts.items():
        try:
            links.rewrite(text, source)
        except DeadLinkError as error:
            dead.append(str(error))
    if dead:
        raise PluginError("dead links:\n" + "\n".join(dead))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite repository links, insert generated tables, and name the source of the page."""
    links = Links()
    source = next((source for source, uri in links.pages.items() if uri == page.file.src_uri), None)
    if source is None:
        return markdown
    if source.endswith(".ipynb"):
        page.meta["hide"] = ["toc"]  # room for lines of code
        text = markdown
    else:
        text = links.rewrite(markdown, source)
        if page.file.src_uri not in (GLOSSARY, "CHANGELOG.md"):
            text = link_terms(text, page.file.src_uri)
        text = blocks.fill(text, _made)
    address = f"{links.repository}/blob/main/{source}"
    title = "" if text.lstrip().startswith("# ") else f"# {page.title}\n\n"
    return f'{title}{text}\n\n<p class="source">Source of this page: <a href="{address}">{source}</a></p>\n'
