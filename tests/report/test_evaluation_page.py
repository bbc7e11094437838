"""The page of an evaluation in a real browser, and its pictures."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
import torch
from browser_page import NOTES, browser, notes, opened
from evaluation_folder import write_folder

from attnscale.errors import ArgumentError
from attnscale.report import build_evaluation_page, read_evaluation, write_report
from attnscale.report.write import write_pictures

SECTIONS = ["verdict", "pareto", "curves", "criticality", "heads", "positions", "depths", "table", "reproduce"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("evaluation"), argmax=True)


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return build_evaluation_page(read_evaluation(folder))


@browser
def test_all_sections_are_there_in_order_with_every_policy_and_the_trained_length(page: str, tmp_path: Path) -> None:
    dom = opened(tmp_path, page)
    assert [found["id"] for found in dom.all("section")] == SECTIONS
    assert "log_squared, the best of 3 policies, answers 95 %" in dom.text["sentences"]
    assert "Spearman's rank correlation 1.00 over 72 points" in dom.text["criticality"]
    canvases = dom.all("canvas")
    assert [int(canvas["width"]) > 300 for canvas in canvases] == [True] * 3
    # Per length axis one mark: two charts of results, four of heads twice, and one by position.
    assert page.count(">trained length</text>") == 2 + 4 * 2 + 1
    for policy in ("constant", "sqrt_log", "log", "log_squared", "argmax"):
        assert policy in dom.text["results"]
    assert "attnscale evaluate --models seed0,seed1" in dom.text["command"]
    assert "f1seed1" in dom.text["reproduce"]


def test_every_term_is_explained_once(page: str) -> None:
    terms = re.findall(r"<dfn>(.*?)</dfn>", page)
    expected = ["β", "n", "trained length", "Bits per byte", "paired difference", "w_max", "Entropy", "Λ", "r"]
    assert terms == expected


def test_policies_differ_in_marker_and_dash_and_not_by_colour_alone(page: str) -> None:
    legend = page[page.index('<ul class="policies">') : page.index("</ul>")]
    without_colour = [re.sub(r"swatch p\d", "", one) for one in re.findall(r"<svg.*?</svg>", legend)]
    assert len(set(without_colour)) == len(without_colour) == 5


def test_no_number_is_missing_or_infinite_in_the_page(page: str) -> None:
    assert re.findall(r"\bnan\b|\bNaN\b|\binf\b|Infinity", page[: page.index('id="content"')]) == []


def test_nothing_comes_from_elsewhere(page: str) -> None:
    assert re.findall(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(", page) == []
    assert "default-src 'none'" in page


CHOOSE = """
(async () => {
  const by_ = (id) => document.getElementById(id);
  while (!document.documentElement.dataset.ready) await later();
  const picture = () => document.querySelector("#map-w_max canvas").toDataURL();
  const set = (id, value) => { by_(id).value = value; by_(id).dispatchEvent(new Event("change")); };
  const seen = () => [by_("readout").textContent, picture()];
  notes.push(seen());
  for (const [id, value] of [["map-policy", "log_squared"], ["map-length", "128"], ["map-model", "1"]]) {
    await after(() => set(id, value));
    notes.push(seen());
  }
  set("which", "all");
  notes.push([...document.querySelectorAll("[data-which]")].map((box) => box.children[0].clientWidth > 0));
  const marker = document.querySelector("#pareto [data-tip]"), box = marker.getBoundingClientRect();
  marker.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left, clientY: box.top, bubbles: true }));
  notes.push(by_("tip").hidden ? "" : by_("tip").textContent);
  await after(() => by_("theme").click());
  await after(() => by_("theme").click());
  notes.push(document.documentElement.dataset.theme);
  keep();
})();
"""


@browser
def test_selects_tooltips_and_the_theme_work(page: str, tmp_path: Path) -> None:
    first, policy, length, model, shown, tip, theme = notes(opened(tmp_path, page, program=NOTES + CHOOSE))
    where = "model.layers.1.self_attn · head 2 · "
    assert first[0] == f"{where}constant at 16384 tokens: w_max 0.2587, r 0.7969, Λ 1.255"
    assert policy[0].startswith(f"{where}log_squared at 16384 tokens: w_max 0.89")
    assert length[0].startswith(f"{where}log_squared at 128 tokens: w_max 0.82")
    assert len({first[1], policy[1], length[1]}) == 3
    assert model[1] != length[1]
    assert shown == [False, True]
    assert re.fullmatch(r"sqrt_log at 64 tokens\n0 points \(−3 to 3\)\n0\.00 bits per byte \(−0\.030 to 0\.030\)", tip)
    assert theme == "dark"


@browser
@pytest.mark.parametrize("width", [400, 1280])
def test_no_width_needs_sideways_scrolling(page: str, width: int, tmp_path: Path) -> None:
    # In a frame, as windows of chromium cannot be as narrow as a phone.
    frame = f'<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    program = """(async () => {
      const inside = () => by_("frame").contentDocument, by_ = (id) => document.getElementById(id);
      while (!inside()?.documentElement?.dataset.ready) await later();
      const root = inside().documentElement;
      notes.push(by_("frame").contentWindow.innerWidth, root.scrollWidth, root.dataset.errors || "");
      keep();
      document.documentElement.dataset.ready = "1";
    })();"""
    wrapper = f'<!DOCTYPE html><html><head><meta charset="utf-8"></head><body>{frame}</body></html>'
    inner, needed, errors = notes(opened(tmp_path, wrapper, program=NOTES + program))
    assert errors == ""
    assert needed <= inner == width


@browser
@pytest.mark.parametrize("tasks", [("recall",), ("perplexity",), ("recall", "needle", "perplexity")])
def test_what_was_not_measured_is_left_out(tasks: tuple[str, ...], tmp_path: Path) -> None:
    data = read_evaluation(write_folder(tmp_path / "some", tasks=tasks, models=("<m&>",)))
    dom = opened(tmp_path, build_evaluation_page(data))
    missing = {"recall": {"pareto", "positions"}, "perplexity": {"pareto", "criticality", "depths"}}
    gone = missing[tasks[0]] if len(tasks) == 1 else set()
    assert [found["id"] for found in dom.all("section")] == [name for name in SECTIONS if name not in gone]
    assert "model <m&>" in dom.text["about"]


def test_the_page_and_the_pictures_go_into_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", tasks=("recall", "perplexity"))
    assert write_report(folder) == folder / "report.html"
    images = pytest.importorskip("matplotlib.image")
    for name in ("accuracy.png", "pareto.png", "criticality.png"):
        pixels = torch.from_numpy(images.imread(folder / name)[..., :3].copy())
        assert pixels.shape[1] > 1700
        assert 0.02 < (pixels.min(dim=-1).values < 0.9).float().mean() < 0.5
        assert pixels.flatten(0, 1).unique(dim=0).shape[0] > 20


def test_pictures_without_numbers_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tasks=("perplexity",))
    assert [path.name for path in write_pictures(folder)] == ["accuracy.png"]


def test_a_page_elsewhere_leaves_the_folder_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    assert write_report(folder, tmp_path / "new" / "page.html").exists()
    assert {path.name for path in folder.iterdir()} == before


def test_without_matplotlib_there_is_a_page_and_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert write_report(folder).exists()
    assert not list(folder.glob("*.png"))


def test_the_numbers_are_never_overwritten_by_the_page(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    before = (folder / "results.csv").read_bytes()
    with pytest.raises(ArgumentError, match=r"output=.*results\.csv"):
        write_report(folder, folder / "results.csv")
    assert (folder / "results.csv").read_bytes() == before
