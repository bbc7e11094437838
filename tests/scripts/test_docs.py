"""The documentation site: links, navigation, API reference, notebooks and generated tables.

None of this needs mkdocs, which only `make docs` installs; the build itself repeats the check of links.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from scripts.docs import __main__ as build
from scripts.docs import blocks, notebooks, policy_plots
from scripts.docs.links import DeadLinkError, Links, anchors_of, read_page
from scripts.docs.sources import DOCS, NOTEBOOKS, PAGES, ROOT, find_pages
from scripts.docs.terms import TERMS, link_terms

FOUND = find_pages()
MARKDOWN = sorted((ROOT / PAGES).rglob("*.md"))
WITH_SNIPPETS = [path for path in MARKDOWN if "```python" in path.read_text(encoding="utf-8")]


# Links


@pytest.mark.parametrize("source", FOUND)
def test_links_of_a_page_lead_somewhere(source: str) -> None:
    Links().rewrite(read_page(ROOT / source), source)


@pytest.fixture
def links(tmp_path: Path) -> Links:
    """A repository with a page for the root, one for a folder, a source file and a picture."""
    files = {
        "README.md": "# Root\n\n## What n is\n",
        "package/README.md": "# Package\n",
        "package/code.py": "",
        "package/data/numbers.csv": "",
        "assets/plot.png": "",
        "pyproject.toml": 'Homepage = "https://example.org/project"\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Links(tmp_path, {"README.md": "README.md", "package/README.md": "package/README.md"})


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](package)", "[a](package/README.md)"),
        ("[`a`](package/README.md)", "[`a`](package/README.md)"),
        ("[a](package/code.py)", "[a](https://example.org/project/blob/main/package/code.py)"),
        ("[a](package/data)", "[a](https://example.org/project/tree/main/package/data)"),
        ("![a](assets/plot.png)", "![a](assets/pictures/plot.png)"),
        ("[![a](assets/plot.png)](package)", "[![a](assets/pictures/plot.png)](package/README.md)"),
        ("[a](#what-n-is)", "[a](#what-n-is)"),
        ("[a](https://example.com/x)", "[a](https://example.com/x)"),
        ("`[a](nowhere.md)`", "`[a](nowhere.md)`"),
        ("```\n[a](nowhere.md)\n```", "```\n[a](nowhere.md)\n```"),
    ],
)
def test_a_repository_link_becomes_a_link_of_the_site(links: Links, link: str, expected: str) -> None:
    assert links.rewrite(link, "README.md") == expected


def test_links_are_relative_to_the_page(links: Links) -> None:
    text = "[a](../README.md#what-n-is) ![b](../assets/plot.png)"
    assert links.rewrite(text, "package/README.md") == "[a](../README.md#what-n-is) ![b](../assets/pictures/plot.png)"
    assert links.pictures == {"assets/plot.png": "assets/pictures/plot.png"}


@pytest.mark.parametrize("target", ["nowhere.md", "package/gone.py", "../outside.md", "#gone", "package#gone"])
def test_a_dead_link_is_an_error_that_quotes_it(links: Links, target: str) -> None:
    with pytest.raises(DeadLinkError, match=re.escape(target)):
        links.rewrite(f"[a](package) and [b]({target})", "README.md")


def test_headings_in_code_have_no_anchor() -> None:
    assert anchors_of("# One\n\n```bash\n# a comment\n```\n\n## `two` and [three](x.md)\n") == {"one", "two-and-three"}


def test_same_names_in_different_folders_would_be_one_picture() -> None:
    links = Links()
    for source in FOUND:
        links.rewrite(read_page(ROOT / source), source)
    assert len(set(links.pictures.values())) == len(links.pictures) > 0


# Glossary


def test_a_term_is_linked_once_and_never_in_code_links_or_headings() -> None:
    text = "## Criticality\n\n`criticality` and [criticality](x.md), criticality r. YaRN, YaRN.\n"
    assert link_terms(text, "attnscale/hf/README.md") == (
        "## Criticality\n\n`criticality` and [criticality](x.md), [criticality](../../glossary.md#criticality) r. "
        "[YaRN](../../glossary.md#yarn), YaRN.\n"
    )


def test_a_page_that_links_a_term_itself_is_left_alone() -> None:
    text = "First Λ, then [Λ](glossary.md#accumulation-scale)."
    assert link_terms(text, "guide.md") == text


def test_every_term_has_an_entry() -> None:
    assert set(TERMS) <= anchors_of(read_page(ROOT / PAGES / "glossary.md"))


# Navigation


def navigation() -> list[str]:
    """The pages that mkdocs.yml lists."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    config = yaml.load((ROOT / DOCS / "mkdocs.yml").read_text(encoding="utf-8"), Loader)

    def entries(nav: Any) -> Iterator[str]:
        for entry in nav:
            (value,) = entry.values()
            if isinstance(value, str):
                yield value
            else:
                yield from entries(value)

    return list(entries(config["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigation()) == sorted(FOUND.values())


def test_every_readme_of_users_is_a_page() -> None:
    readmes = {path.relative_to(ROOT).as_posix() for folder in ROOT.iterdir() for path in _readmes(folder)}
    assert readmes - {"README.md"} <= set(FOUND)


def _readmes(folder: Path) -> Iterator[Path]:
    """READMEs of a folder of the repository; not those of tests, environments, builds and runs."""
    if folder.is_dir() and folder.name in {"attnscale", "kernels", "scripts", "configs"}:
        yield from folder.rglob("README.md")


# API reference

WITH_ALL = (
    "attnscale",
    "attnscale.policies",
    "attnscale.statistics",
    "attnscale.hf",
    "attnscale.diagnostics",
    "attnscale.distributed",
    "attnscale.report",
    "attnscale_kernels",
)
THEORY = tuple(
    f"attnscale.theory.{found.name}"
    for found in pkgutil.iter_modules([str(ROOT / "attnscale/theory")])
    if not found.ispkg
)


def imported(name: str) -> ModuleType:
    if name == "attnscale.hf":
        pytest.importorskip("transformers")
    if name == "attnscale_kernels":
        pytest.importorskip("triton")
    return importlib.import_module(name)


def defined_in(module: ModuleType) -> dict[str, object]:
    """The public functions and classes that a module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and callable(value)
    }


def public_names(name: str) -> dict[str, object]:
    module = imported(name)
    if name in WITH_ALL:
        return {public: getattr(module, public) for public in module.__all__}
    return defined_in(module)


def directives() -> list[str]:
    """What the reference documents: the names after `:::`."""
    made = {name: block()[0] for name, block in blocks.BLOCKS.items() if name == "policy_classes"}
    texts = [
        blocks.fill(path.read_text(encoding="utf-8"), made)
        for path in sorted((ROOT / PAGES / "reference").glob("*.md"))
    ]
    return [name for text in texts for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)]


def resolved(path: str) -> object:
    """The object of a dotted path: a module, or an attribute of one."""
    module, _, name = path.rpartition(".")
    if path in THEORY:
        return importlib.import_module(path)
    return getattr(imported(module) if module not in sys.modules else sys.modules[module], name)


@pytest.mark.parametrize("module", [*WITH_ALL, *THEORY])
def test_the_reference_has_every_public_name(module: str) -> None:
    names = public_names(module)
    documented = [path for path in directives() if importlib.util.find_spec("transformers") or ".hf" not in path]
    paths, objects = set(documented), [resolved(path) for path in documented]
    for found in [found for found in objects if isinstance(found, ModuleType)]:
        objects += defined_in(found).values()
    known = {id(found) for found in objects}
    missing = [name for name, value in names.items() if id(value) not in known and f"{module}.{name}" not in paths]
    assert missing == []


def test_names_of_the_reference_are_not_those_of_modules() -> None:
    """`attnscale.convert` is a function for Python, and the module of that name for mkdocstrings."""
    paths = [path for path in directives() if path not in THEORY]
    assert [path for path in paths if (ROOT / f"{path.replace('.', '/')}.py").exists()] == []


def test_the_reference_names_nothing_twice() -> None:
    names = directives()
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("module", [*WITH_ALL, *THEORY])
def test_every_public_name_has_a_docstring(module: str) -> None:
    undocumented = []
    for name, value in public_names(module).items():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue  # constants
        if not value.__doc__:
            undocumented.append(name)
        undocumented += [f"{name}.{member}" for member in _undocumented_members(value) if inspect.isclass(value)]
    assert undocumented == []


def _undocumented_members(kind: object) -> list[str]:
    """Public methods and properties without a docstring of their own, of a base class or of the protocol of sinks."""
    from attnscale.diagnostics import EventSink, ProgressSink, RunSink

    protocols = (EventSink, ProgressSink, RunSink) if kind.__name__.endswith("Sink") else ()  # type: ignore[attr-defined]
    interface = {name for one in protocols for name in (*vars(one), "log", "close")}
    return [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and isinstance(value, (type(_readmes), property, classmethod, staticmethod))
        and name not in interface
        and not inspect.getdoc(getattr(kind, name))
    ]


# Pages


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in place of the one that snippets name."""
    folder = tmp_path_factory.mktemp("model")
    if importlib.util.find_spec("transformers"):
        importlib.import_module("tiny_models").llama(vocab_size=256).float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda path: path.stem)
def test_snippets_of_a_page_run_from_top_to_bottom(
    page: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import doctest

    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for module in ("attnscale_kernels.availability", "attnscale.backends.triton"):
        monkeypatch.setattr(importlib.import_module(module), "interpreting", lambda: False)  # as for a user
    known: dict[str, Any] = {"__builtins__": builtins}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if "transformers" in code:
            pytest.importorskip("transformers")
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, known, page.name, None, None)
            assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
        else:
            exec(code.replace('"HuggingFaceTB/SmolLM2-135M"', repr(str(model_folder))), known)


def test_generated_blocks_are_known() -> None:
    used = {name for path in MARKDOWN for name in blocks.names_in(path.read_text(encoding="utf-8"))}
    assert used == set(blocks.BLOCKS)


def test_text_for_github_is_replaced_together_with_its_mark() -> None:
    page = "a\n\n<!-- generated: one -->\nonly on GitHub\n<!-- end: one -->\n\n<!-- generated: two -->\n\nb\n"
    assert blocks.names_in(page) == ["one", "two"]
    assert blocks.fill(page, {"one": "1", "two": "2"}) == "a\n\n1\n\n2\n\nb\n"


@pytest.mark.parametrize("page", [path for path in MARKDOWN if path.parent.name == "pages"], ids=lambda path: path.stem)
def test_a_page_shows_something_on_github_where_the_site_has_a_generated_part(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert blocks.fill(text, dict.fromkeys(blocks.BLOCKS, "")).count("<!--") == 0
    for name in blocks.names_in(text):
        (shown,) = re.findall(rf"<!-- generated: {name} -->\n(.+?)\n<!-- end", text, re.DOTALL)
        assert "`make docs`" in shown


@pytest.mark.parametrize("kernels", ["used", "failed", "missing"])
def test_the_table_of_backends_is_that_of_the_dispatch(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from attnscale import StatsRequest, explain_dispatch
    from attnscale.backends import dispatch
    from attnscale.backends.triton import TritonBackend

    text = (ROOT / PAGES / "guide.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (CPU|GPU) \| (.+?) \| (.+?) \| `(\w+)` \| `(\w+)` \|$", text, re.MULTILINE)
    assert len(table) == 6
    monkeypatch.setattr(TritonBackend, "automatic", True)
    monkeypatch.setattr(dispatch, "why_kernels_distrusted", lambda *_: None if kernels == "used" else kernels)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    more = ({"request": StatsRequest()}, {"softcap": 30.0}, {"sinks": torch.zeros(2)})
    for device, dtype, call, first, second in table:
        why = None if device == "GPU" and kernels != "missing" else "missing"
        monkeypatch.setattr(TritonBackend, "why_unsupported", staticmethod(lambda *_, why=why: why))
        place = {"CPU": "cpu", "GPU": "meta"}[device]  # dispatch asks for a device other than the CPU
        policies = re.findall(r"`(\w+)`", call) or ["constant", "log", "gap_adaptive"]
        for name in dtype.split(", ") if dtype != "any" else dtypes:
            x = torch.empty(1, 2, 8, 16, device=place, dtype=dtypes[name])
            for policy in policies:
                law = {"name": "yarn", "factor": 4} if policy == "yarn" else policy
                for rules in more if "statistics" in call else ({},):
                    rules = {key: v.to(place) if isinstance(v, torch.Tensor) else v for key, v in rules.items()}
                    found = explain_dispatch(x, x, x, is_causal=True, policy=law, **rules)
                    assert found.chosen == (first if kernels == "used" else second), (device, name, call, policy)


def test_the_table_of_events_has_every_cause_with_its_rule_and_advice() -> None:
    from attnscale.diagnostics.events import CAUSES

    text, _ = blocks.events()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == list(CAUSES)
    assert all(len(row) == 4 and all(row) for row in rows)


def test_every_policy_has_a_plot() -> None:
    text, pictures = policy_plots.section()
    for name in policy_plots.POLICIES:
        assert f"\n### {name}\n" in text
        assert pictures[f"assets/policies/{name}.svg"].count("<path") > 10


def test_the_same_curves_give_the_same_picture() -> None:
    curves = policy_plots.curves_of("per_head")
    assert [curve.label for curve in curves] == ["heads 0-1", "the other heads"]
    assert float(curves[0].beta[-1]) > float(curves[1].beta[-1]) == 1.0
    assert policy_plots.draw(curves) == policy_plots.draw(curves)


# Notebooks


@pytest.mark.parametrize("path", sorted((ROOT / NOTEBOOKS).glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_output(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def notebook(source: str) -> str:
    cell = {"cell_type": "code", "id": "one", "metadata": {}, "execution_count": None, "outputs": [], "source": source}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_a_notebook_is_executed_and_shows_its_output() -> None:
    pytest.importorskip("nbclient", reason="make docs installs it")
    text, pictures = notebooks.to_markdown(notebooks.execute(notebook("print('sum:', 40 + 2)"), "sum.ipynb"), "sum")
    assert "sum: 42" in text
    assert pictures == {}


def test_a_cell_that_raises_fails_the_build() -> None:
    pytest.importorskip("nbclient", reason="make docs installs it")
    with pytest.raises(RuntimeError, match=r"(?s)bad\.ipynb.*ZeroDivisionError"):
        notebooks.execute(notebook("1 / 0"), "bad.ipynb")


def test_pictures_and_tables_of_cells_are_shown() -> None:
    outputs = [
        {"output_type": "stream", "text": ["a\n"]},
        {"output_type": "stream", "text": ["b\n"]},
        {"output_type": "display_data", "data": {"image/svg+xml": "<svg/>", "text/plain": "<Figure>"}},
        {"output_type": "execute_result", "data": {"text/html": "<style>x</style><table></table>", "text/plain": ""}},
    ]
    cells = [{"cell_type": "markdown", "source": "# Title"}, {"cell_type": "code", "source": "f()", "outputs": outputs}]
    text, pictures = notebooks.to_markdown({"cells": cells}, "stem", str.upper)
    assert text.startswith("# TITLE\n\n```python\nf()\n```")
    assert "\na\nb\n" in text
    assert pictures == {"assets/notebooks/stem_1.svg": b"<svg/>"}
    assert "(../assets/notebooks/stem_1.svg)" in text
    assert "<table></table>" in text
    assert "<style>" not in text


# The built site


@pytest.mark.parametrize(
    ("html", "remote"),
    [
        ('<script src="https://unpkg.com/x"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img alt="" src="https://example.org/x.png">', True),
        ('<a href="https://example.org">a link loads nothing</a><script src="assets/x.js"></script>', False),
    ],
)
def test_a_page_that_loads_from_another_host_is_found(tmp_path: Path, html: str, remote: bool) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    assert build.remote_resources(tmp_path) == (["page.html"] if remote else [])


def test_a_page_with_a_path_of_the_machine_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(f"{ROOT}/attnscale/x.py:1: Warning", encoding="utf-8")
    assert build.machine_paths(tmp_path) == ["page.html"]
