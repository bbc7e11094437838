"""The page of a run: opened in a real browser, with the numbers of the records, and nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_page import NOTES, Dom, browser, notes, opened

from attnscale.cli import main
from attnscale.diagnostics import Alert, Event, JsonlSink, Record, Summary
from attnscale.diagnostics.records.record import STATISTICS
from attnscale.report import build_page, read_run, write_report
from attnscale.report.data import Key
from attnscale.report.page import DETAILS, encode

EVIL = 'blocks.1."</script><b>&amp;.attn'  # a name that breaks a page which does not escape
LAYERS = {"blocks.0.x.attn": 2, EVIL: 3, "blocks.2.x.attn": 2}
STEPS = (0, 10, 20, 40, 50)


def spread(centre: float, rows: int = 64) -> Summary:
    return Summary(centre, 0.7 * centre, 0.9 * centre, 1.3 * centre, 0.5 * centre, 2 * centre, rows)


def records() -> Iterator[Record]:
    """A small run with what is awkward: layers of unequal size, missing backward, NaN, infinity, mismatch."""
    generator = torch.Generator().manual_seed(3)
    for step in STEPS:
        for layer, heads in LAYERS.items():
            for head in range(heads):
                u, v, w, x = torch.rand(4, generator=generator).tolist()
                forward = {
                    "visible": spread(100),
                    "w_max": spread(0.4 * u + 0.1),
                    "relative_entropy": spread(0.4 * v + 0.1),
                    "entropy": spread(3 * v),
                    "max_logit": spread(30 * w - 10),
                    "gap_count_1": spread(1 + 10 * x),
                    "gap_count_4": spread(20 + 10 * x),
                }
                if (step, layer, head) == (20, EVIL, 2):
                    forward["max_logit"] = spread(math.inf)
                    forward["entropy"] = spread(math.nan)
                again = {name: forward[name] for name in ("w_max", "entropy", "gap_count_1", "gap_count_4")}
                if (step, layer, head) == (40, EVIL, 1):
                    again["w_max"] = spread(0.987)
                backward = {} if step == 10 else again | {"score_gradient": spread(10 ** (-6 * u))}
                scalars = {"angle_ratio": v} | ({} if step == 10 else {"gain": 10 ** (-5 * u), "mismatch": 0.0})
                if (step, layer, head) == (40, EVIL, 1):
                    scalars["mismatch"] = 0.6125
                yield Record(step, layer, head, forward, backward, scalars)


ALERTS = (
    Alert("collapsed", 20, EVIL, 2, 0.995, 0.99, "half of the rows give 0.995 to one key"),
    Alert("collapsed", 40, EVIL, 2, 0.996, 0.99, "half of the rows give 0.996 to one key"),
    Alert("exploding", 40, "blocks.0.x.attn", 1, math.inf, 100.0, "a logit has reached inf"),
    Alert("broken", 40, "blocks.2.x.attn", 1, math.nan, 0.0, "the output holds NaN or infinity, first in row 3", 3),
)


def write_run(path: Path) -> Path:
    sink = JsonlSink(path)
    for step in STEPS:
        sink.log([record for record in records() if record.step == step], step)
        sink.event([Event.from_alert(alert.as_dict()) for alert in ALERTS if alert.step == step], step)
    sink.close()
    return path


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "attn.jsonl")


@pytest.fixture(scope="module")
def page(run_file: Path) -> str:
    return build_page(read_run(run_file))


def known() -> dict[tuple[int, str, int], Record]:
    return {(record.step, record.layer, record.head): record for record in records()}


def value_of(record: Record, phase: str, name: str, statistic: str) -> float:
    """What the page should show; NaN where nothing was recorded."""
    if phase == "scalar":
        return record.scalars.get(name, math.nan)
    summary = getattr(record, phase).get(name)
    return math.nan if summary is None else getattr(summary, statistic)


Open = Callable[..., Dom]


@pytest.fixture
def open_page(tmp_path: Path) -> Open:
    return partial(opened, tmp_path)


@browser
def test_every_plot_is_drawn_and_says_what_it_shows(page: str, open_page: Open) -> None:
    dom = open_page(page, "step=40&quantity=w_max")
    canvases, charts = dom.all("canvas"), dom.all("svg", "chart")
    assert [int(canvas["width"]) > 300 and int(canvas["height"]) > 60 for canvas in canvases] == [True] * 3
    assert len(charts) == 6
    assert all(found.get("tabindex") == "0" and found["aria-label"] for found in canvases + charts)
    assert len(dom.all("polygon", "band")) == 1
    labels = [found.get("data-label") for found in dom.all("polyline", "line")]
    assert {name: labels.count(name) for name in ("head 0", "forward", "median")} == {
        "head 0": 1,
        "forward": 3,
        "median": 1,
    }
    assert labels.count("backward") == 3  # after the step without; before it there is one point, which is a dot
    assert labels.count("mismatch") == 1
    titles = {name: dom.text[name] for name in dom.text if name.startswith("title-")}
    assert titles == {
        "title-heads": "Layer × head",
        "title-steps": "Layer × step",
        "title-curve": "Over steps",
        "title-both": "Forward and backward",
        "title-gain": "Gradient gain per layer",
        "title-alerts": "Alerts",
    }
    assert "3 layers, 7 heads, 5 reports from step 0 to 50" in dom.text["about"]
    assert "4 alerts" in dom.text["about"]
    assert "The largest difference of the run is 0.6125" in dom.text["hint-both"]
    assert f"{EVIL}, head 1, step 40" in dom.text["hint-both"]
    assert all(EVIL in dom.text[place] for place in ("layer", "alerts"))
    assert dom.all("b") == [{"id": "value", "data-value": dom.by_id("value")["data-value"]}]
    assert "limit" in dom.text["alerts"]
    assert "the output holds NaN or infinity, first in row 3" in dom.text["alerts"]
    assert "20 to 40" in dom.text["alerts"]
    assert "∞" in dom.text["alerts"]


ALL_NUMBERS = """
(async () => {
  const content = JSON.parse(document.getElementById("content").textContent);
  while (!document.documentElement.dataset.ready) await later();
  for (const { phase, name, statistic } of content.planes) {
    for (const step of statistic === "mean" || statistic === "value" ? [10, 20, 40] : [40]) {
      const address = `#step=${step}&quantity=${phase}.${name}&statistic=${statistic}&table=open`;
      await after(() => { location.hash = address; });
      const rows = [...document.querySelectorAll("#table tr")].slice(1);
      const cells = rows.map((row) => [...row.cells].slice(1).map((cell) => cell.textContent));
      notes.push([phase, name, statistic, step, cells]);
    }
  }
  keep();
})();
"""


def number(text: str) -> float:
    special = {"–": math.nan, "∞": math.inf, "−∞": -math.inf}
    return special[text] if text in special else float(text.replace("−", "-"))


def check_numbers(found: list[Any], tolerance: Callable[[str, str, str], tuple[float, float]]) -> None:
    expected = known()
    assert found
    for phase, name, statistic, step, rows in found:
        relative, absolute = tolerance(phase, name, statistic)
        for (layer, heads), cells in zip(LAYERS.items(), rows, strict=True):
            assert len(cells) == heads
            for head, cell in enumerate(cells):
                value = value_of(expected[step, layer, head], phase, name, statistic)
                room = relative * abs(value) + absolute if math.isfinite(value) else 0.0
                wanted = pytest.approx(value, rel=0, abs=room, nan_ok=True)
                assert number(cell) == wanted, (phase, name, statistic, step, layer, head)


@browser
def test_every_number_in_the_page_is_that_of_the_record(page: str, open_page: Open) -> None:
    found = notes(open_page(page, program=NOTES + ALL_NUMBERS))
    quantities = {(phase, name) for phase, name, *_ in found}
    assert len(quantities) == 7 + 5 + 3
    assert {statistic for _, _, statistic, *_ in found} == {*STATISTICS, "value"}
    # Four digits are shown, and three of what is below 1e-3; a file holds 11 bits.
    check_numbers(found, lambda _, name, __: (5.6e-3 if name in ("gain", "score_gradient") else 1.01e-3, 0.0))


@browser
def test_numbers_of_a_large_run_are_rounded_but_right(run_file: Path, open_page: Open) -> None:
    run = read_run(run_file)
    budget = sum(len(plane.text) for plane in encode(run, 0)[2])  # two steps in the least detail
    while encode(run, budget)[0].steps != run.steps:
        budget = int(budget * 1.05)
    assert encode(run, budget)[1] == DETAILS[-1]
    dom = open_page(build_page(run, budget), program=NOTES + ALL_NUMBERS)
    assert "rounded" in dom.text["footer"]
    found = notes(dom)
    assert {statistic for _, _, statistic, *_ in found} == {"mean", "p10", "p90", "value"}

    def tolerance(phase: str, name: str, statistic: str) -> tuple[float, float]:
        plane = run.planes[Key(phase, name, statistic)]
        other = run.planes.get(Key("backward" if phase == "forward" else "forward", name, statistic), plane)
        finite = torch.cat([plane, other])
        finite = finite[finite.isfinite()]
        levels = 252 if statistic in ("p10", "p90") else 65532
        if finite.min() > 0 and finite.max() / finite.min() > 1000:
            return 5.6e-3 + float((finite.max() / finite.min()).log()) / levels, 0.0
        return 1.01e-3, 0.51 * float(finite.max() - finite.min()) / levels

    check_numbers(found, tolerance)


INTERACT = """
(async () => {
  const by_ = (id) => document.getElementById(id), seen = () => by_("readout").textContent;
  const key = (target, name) => target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const move = (target, x, y) => {
    const box = target.getBoundingClientRect();
    const place = { clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true };
    target.dispatchEvent(new PointerEvent("pointermove", place));
    return by_("tip").hidden ? null : by_("tip").textContent;
  };
  while (!document.documentElement.dataset.ready) await later();
  const heads = document.querySelector("#heads canvas"), curve = document.querySelector("#curve svg");
  const note = async (name, act) => { await after(act); notes.push([name, seen(), location.hash]); };
  await note("down", () => key(heads, "ArrowDown"));
  await note("right", () => key(heads, "ArrowRight"));
  await note("end", () => key(heads, "End"));
  await note("step", () => key(curve, "ArrowLeft"));
  await note("home", () => key(curve, "Home"));
  await note("slider", () => { by_("step").value = 3; by_("step").dispatchEvent(new Event("input")); });
  const set = (id, value) => { by_(id).value = value; by_(id).dispatchEvent(new Event("change")); };
  await note("quantity", () => set("quantity", "scalar.gain"));
  await note("alert", () => document.querySelector("#alerts tbody tr").click());
  await note("lines", () => set("lines", "layers"));
  notes.push(["drawn", document.querySelectorAll("#curve polyline").length]);
  const address = "theme=dark&quantity=w_max&step=21&layer=blocks.0.x.attn&head=1&lines=head";
  await note("dark", () => { location.hash = address; });
  notes.push(["theme", document.documentElement.dataset.theme]);
  notes.push(["cell", move(heads, 0.45, 0.1)], ["outside", move(heads, 0.5, 0.99)], ["curve", move(curve, 0.99, 0.5)]);
  await after(() => set("kind", "nan"));
  notes.push(["kinds", [...document.querySelectorAll("#alerts tbody tr")].map((row) => row.textContent)]);
  keep();
})();
"""


@browser
def test_keys_pointer_controls_and_address_choose_what_is_shown(page: str, open_page: Open) -> None:
    found = notes(open_page(page, "step=50", program=NOTES + INTERACT))
    shown = {name: rest for name, *rest in found}
    where = {
        name: rest[0].split(": ")[0] for name, rest in shown.items() if isinstance(rest[0], str) and "Step" in rest[0]
    }
    assert where == {
        "down": f"Step 50 · {EVIL} · head 0",
        "right": f"Step 50 · {EVIL} · head 1",
        "end": f"Step 50 · {EVIL} · head 2",
        "step": f"Step 40 · {EVIL} · head 2",
        "home": f"Step 0 · {EVIL} · head 2",
        "slider": f"Step 40 · {EVIL} · head 2",
        "quantity": f"Step 40 · {EVIL} · head 2",
        "alert": f"Step 20 · {EVIL} · head 2",
        "lines": f"Step 20 · {EVIL} · head 2",
        "dark": "Step 20 · blocks.0.x.attn · head 1",
    }
    assert "gain" in shown["quantity"][0]
    assert "quantity=scalar.gain" in shown["quantity"][1]
    assert "largest weight w_max" in shown["alert"][0]
    assert "alert: collapse" in shown["alert"][0]
    assert "quantity=forward.w_max" in shown["alert"][1]
    assert shown["drawn"] == [3]
    assert shown["theme"] == ["dark"]
    record = known()[20, "blocks.0.x.attn", 0].forward["w_max"]
    name, value, rows = shown["cell"][0].split("\n")
    assert name == "blocks.0.x.attn · head 0 · step 20"
    assert number(value.split(": ")[1]) == pytest.approx(record.mean, rel=1e-3)
    low, high = (number(x) for x in rows.removeprefix("10–90 % of rows: ").split(" to "))
    assert (low, high) == pytest.approx((record.p10, record.p90), rel=1e-3)
    assert shown["outside"] == [None]
    last = known()[50, "blocks.0.x.attn", 1].forward["w_max"].mean
    assert shown["curve"][0].startswith("step 50\nhead 1: ")
    assert number(shown["curve"][0].split()[4]) == pytest.approx(last, rel=1e-3)
    (line,) = shown["kinds"][0]
    assert line.startswith("nan")


@browser
def test_a_narrow_window_needs_no_sideways_scrolling(page: str, open_page: Open) -> None:
    program = """(async () => {
      while (!document.documentElement.dataset.ready) await later();
      notes.push(innerWidth, document.documentElement.scrollWidth);
      keep();
    })();"""
    inner, needed = notes(open_page(page, program=NOTES + program, width=500))
    assert needed <= inner <= 500


@browser
def test_a_run_of_one_step_and_one_head_without_backward_is_drawn(open_page: Open, tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "one.jsonl")
    sink.log([Record(5, "attn", 0, {"w_max": spread(0.5), "mine": spread(-3)})], 5)
    sink.close()
    dom = open_page(build_page(read_run(tmp_path / "one.jsonl")), "quantity=mine")
    assert "Step 5 · attn · head 0: mean of mine −3" in dom.text["readout"]
    assert "This run has no backward records." in dom.text["hint-both"]
    assert "no alerts" in dom.text["about"]


def test_nothing_in_the_page_comes_from_elsewhere(page: str) -> None:
    without_numbers = re.sub(r'<script type="text/plain" class="plane">[^<]*</script>', "", page)
    assert re.findall(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(", without_numbers) == []
    assert "default-src 'none'" in without_numbers


def test_a_run_that_was_resumed_counts_what_it_did_again(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run.jsonl")
    for step, w_max in ((0, 0.1), (5, 0.2), (10, 0.3), (5, 0.6), (10, 0.7)):
        sink.log([Record(step, "attn", 0, {"w_max": spread(w_max)})], step)
    sink.close()
    run = read_run(tmp_path / "run.jsonl")
    assert run.steps == [0, 5, 10]
    assert run.planes[Key("forward", "w_max", "mean")].flatten().tolist() == pytest.approx([0.1, 0.6, 0.7], rel=2**-11)


def test_a_record_less_what_others_have_leaves_gaps_and_shifts_nothing(run_file: Path) -> None:
    run, expected = read_run(run_file), known()
    assert run.columns == [(layer, head) for layer, heads in LAYERS.items() for head in range(heads)]
    for key, plane in run.planes.items():
        for row, step in enumerate(run.steps):
            for column, (layer, head) in enumerate(run.columns):
                value = value_of(expected[step, layer, head], *key)
                assert plane[row, column].item() == pytest.approx(value, rel=2**-11, abs=0, nan_ok=True)


def test_alerts_are_grouped_by_head_and_kind_and_marked_where_they_were(run_file: Path) -> None:
    run = read_run(run_file)
    assert [(len(group), group[0], group[-1].step) for group in run.groups[:1]] == [
        (2, Event.from_alert(ALERTS[0].as_dict()), 40)
    ]
    assert run.kinds == ["collapse", "exploding", "nan"]
    marked = {(run.steps[s], *run.columns[c]): int(run.alerting[s, c]) for s, c in run.alerting.nonzero().tolist()}
    assert marked == {
        (20, EVIL, 2): 1,
        (40, EVIL, 2): 1,
        (40, "blocks.0.x.attn", 1): 2,
        (40, "blocks.2.x.attn", 1): 4,
    }


def test_thinning_keeps_the_ends_and_every_alert(run_file: Path) -> None:
    run = read_run(run_file).thinned(2)
    assert run.steps == [0, 50]
    assert run.alerting.tolist() == [[0, 2, 0, 0, 1, 0, 4], [0] * 7]


def test_what_does_not_fit_loses_detail_first_and_steps_last(run_file: Path) -> None:
    run = read_run(run_file)
    size = sum(len(plane.text) for plane in encode(run)[2])
    assert encode(run, size)[:2] == (run, DETAILS[0])
    previous = (len(run.steps), 0)
    for share in (0.8, 0.5, 0.35, 0.25, 0.2, 0.15):
        shown, detail, planes = encode(run, int(share * size))
        assert sum(len(plane.text) for plane in planes) <= share * size or len(shown.steps) == 2
        now = (len(shown.steps), DETAILS.index(detail))
        assert now[0] <= previous[0]
        assert now[1] >= previous[1]
        assert now[0] == len(run.steps) or detail is DETAILS[-1]
        previous = now
    assert previous[0] < len(run.steps)


def test_a_page_of_a_large_model_stays_below_20_mb(run_file: Path) -> None:
    # As for 48 layers of 32 heads: a hundredth of the budget for a hundredth of the heads, and noise for numbers.
    generator = torch.Generator().manual_seed(0)
    run = read_run(run_file)
    columns = [("attn", head) for head in range(15)]
    planes = {
        Key(phase, f"quantity_{index}", statistic): torch.rand(200, 15, generator=generator)
        for phase, number in (("forward", 14), ("backward", 9))
        for index in range(number)
        for statistic in STATISTICS
    }
    shape = {"steps": list(range(200)), "columns": columns, "alerting": torch.zeros(200, 15, dtype=torch.uint8)}
    text = build_page(type(run)(**{**vars(run), **shape, "planes": planes}), 175_000)
    numbers = sum(map(len, re.findall(r'class="plane">([^<]*)<', text)))
    assert 140_000 < numbers < 180_000
    assert len(text) - numbers < 150_000


def test_report_writes_the_page_and_says_where(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "new" / "page.html"
    assert main(["report", str(run_file), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == f"wrote {output}"
    assert output.read_text(encoding="utf-8") == page


def test_the_page_lies_beside_the_records_and_replaces_nothing_but_a_page(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    (tmp_path / "run.v2").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("mine")
    records, output = Path("run.v2", "attn.jsonl"), Path("run.v2", "attn.html")
    shutil.copy(run_file, records)
    for _ in range(2):  # the second replaces the first
        assert main(["report", str(records)]) == 0
        assert capsys.readouterr().out == f"wrote {output}\n"
        written = output.read_text(encoding="utf-8")
        assert len(written) > len(page) // 2
    output.write_text("<title>notes of mine</title>")
    assert main(["report", str(records)]) == 2
    assert "'run.v2/attn.html' exists" in capsys.readouterr().err
    assert output.read_text() == "<title>notes of mine</title>"
    assert main(["report", str(records), "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == written
    assert Path("report.html").read_text() == "mine"


def lines(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "run.jsonl").write_bytes(content)
    return tmp_path / "run.jsonl"


GOOD = json.dumps({"kind": "record", **Record(0, "attn", 0, {"w_max": spread(0.5)}).as_dict()}).encode() + b"\n"
ALERT = json.dumps({"kind": "alert", "alert": ALERTS[0].as_dict()}).encode() + b"\n"
MISTAKES: dict[str, tuple[bytes | None, str]] = {
    "an existing file of reports": (None, "page.html"),
    "a file of reports": (b"", "page.html"),
    "contains at least one report": (GOOD[:-1], "page.html"),
    "at least one report": (ALERT, "page.html"),
    "that contains at least one report": (b"[" * 100_000 + b"\n", "page.html"),
    "at least one report that can be read": (GOOD.replace(b'"mean": 0.5', b'"mean": [0.5]'), "page.html"),
    "an HTML file, not a directory": (GOOD, "folder"),
    "a file other than the JSONL file": (GOOD, "run.jsonl"),
    "cannot be written": (GOOD, "run.jsonl/page.html"),
}


@pytest.mark.parametrize(("message", "content", "output"), [(m, *rest) for m, rest in MISTAKES.items()], ids=MISTAKES)
def test_a_mistake_exits_with_two_and_leaves_nothing(
    message: str, content: bytes | None, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "run.jsonl" if content is None else lines(tmp_path, content)
    assert main(["report", str(path), "--output", str(tmp_path / output)]) == 2
    captured = capsys.readouterr()
    assert "ArgumentError" in captured.err
    assert message in captured.err
    assert "wrote" not in captured.out
    assert {found.name for found in tmp_path.rglob("*")} == {"folder", *([] if content is None else ["run.jsonl"])}
    if content is not None:
        assert path.read_bytes() == content


def test_a_directory_without_results_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 2
    assert "with results.csv" in capsys.readouterr().err


def test_an_earlier_page_survives_a_failure(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "page.html"
    output.write_text("earlier")
    monkeypatch.setattr("attnscale._util.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(ValueError, match="disk full"):
        write_report(run_file, output)
    assert output.read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
