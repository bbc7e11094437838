"""The page of a run: opened in a real browser, with the numbers of the records, and nothing from elsewhere."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_page import NOTES, Dom, browser, notes, opened

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.cli import main
from attnscale.diagnostics import Event, JsonlSink, Record, Summary, Thresholds
from attnscale.diagnostics.events import CAUSES
from attnscale.diagnostics.records.record import STATISTICS
from attnscale.diagnostics.records.report import Report
from attnscale.report import Run, build_page, read_run, write_report
from attnscale.report.encoding import DETAILS, encode
from attnscale.report.run import Key, merged

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


JUMP = Event(
    *(0, "logit_jump", "begun", "warning", 20, 20, ((EVIL, (2,)),)),
    "the largest logit jumped from 3 to 30 in head 2, since step 20",
    "Look at the batch.",
    *("max_logit", 30.0, 3.0),
)
COLLAPSE = Event(
    *(1, "collapse", "begun", "critical", 40, 40, (("blocks.0.x.attn", (0, 1)), ("blocks.2.x.attn", ()))),
    "entropy fell from 0.50 to 0.10 of ln n in 4 heads, since step 40",
    "Lower the learning rate.",
    *("relative_entropy", 0.1, 0.5),
)
HEADER = {
    "kind": "run",
    "model": "Gpt<b>",
    "layers": 3,
    "heads": 3,
    "policy": "log",
    "every": 10,
    "rows": None,
    "attnscale": "0.9",
    "torch": "2.13",
    "started": "2026-11-18T13:16:59+00:00",
    "format": 1,
}


def line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def record_lines(*some: Record) -> bytes:
    return b"".join(line({"kind": "record", **record.as_dict()}) for record in some)


def event_lines(*some: Event) -> bytes:
    return b"".join(line({"kind": "event", "event": event.as_dict()}) for event in some)


def write_run(path: Path, events: Iterable[Event] = (JUMP, replace(JUMP, status="over", step=50), COLLAPSE)) -> Path:
    content = line(HEADER)
    for step in STEPS:
        content += record_lines(*(record for record in records() if record.step == step))
        content += event_lines(*(event for event in events if event.step == step))
    path.write_bytes(content)
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
    dom = open_page(page, "step=40&quantity=w_max&layer=blocks.0.x.attn&head=0&more=open")
    canvases, charts = dom.all("canvas"), dom.all("svg", "chart")
    assert [int(canvas["width"]) > 300 and int(canvas["height"]) > 60 for canvas in canvases] == [True] * 3
    quantities = 7 + 5 + 3
    assert len(charts) == quantities + 1 + 4 + 1  # the curve, forward and backward, the gain
    assert all(found.get("tabindex") == "0" and found["aria-label"] for found in canvases + charts)
    lines = [found.get("data-label") for found in dom.all("polyline", "line")]
    assert {name: lines.count(name) for name in ("forward", "backward", "median")} == {
        "forward": 3,
        "backward": 3,  # after the step without; before it there is one point, which is a dot
        "median": 1,
    }
    assert "Gpt<b> · policy log · every 10 steps, all rows · started 2026-11-18 13:16" in dom.text["about"]
    assert "attnscale 0.9, torch 2.13 · 3 layers, 7 heads · 5 reports from step 0 to 50" in dom.text["about"]
    assert "The largest difference of the run is 0.6125" in dom.text["hint-both"]
    assert f"{EVIL}, head 1, step 40" in dom.text["hint-both"]
    assert EVIL in dom.text["layer"]
    assert {found.get("id") for found in dom.all("b") if "id" in found} == {"value"}
    assert "row is one query" in dom.text["terms"]
    assert len(dom.all("line", "limit")) == 5  # w_max in both passes and in the curve, relative_entropy, mismatch
    assert "exploding above 100 (off this scale)" in dom.text["main"]


@browser
def test_the_first_lines_say_what_is_wrong_where_since_when_and_what_to_try(page: str, open_page: Open) -> None:
    dom = open_page(page)
    words = " ".join(dom.text["verdict"].split())
    assert words.startswith(
        "■1 problem at the last report, step 50, 1 in the past"
        "critical Entropy collapse: entropy fell from 0.50 to 0.10 of ln n in 4 heads, since step 40. "
        "Ongoing at step 50.What to try: Lower the learning rate."
        "over Logits jumped: the largest logit jumped from 3 to 30 in head 2, since step 20. "
        "Over at step 50.What to try: Look at the batch."
    )
    bars = [re.findall(r"[\d.]+%", found["style"]) for found in dom.all("button", "bar")]
    assert bars == [["80%", "100%", "20%"], ["40%", "100%", "60%"]]
    # The least entropy of the four heads at step 40.
    places = [("blocks.0.x.attn", 0), ("blocks.0.x.attn", 1), ("blocks.2.x.attn", 0), ("blocks.2.x.attn", 1)]
    layer, head = min(places, key=lambda place: known()[(40, *place)].forward["relative_entropy"].mean)
    assert dom.text["readout"].startswith(f"Step 40 · {layer} · head {head}: mean of entropy / ln n ")
    assert dom.text["readout"].endswith("event: entropy collapse")


@browser
def test_a_healthy_run_opens_with_one_line_at_the_head_with_the_largest_logit(tmp_path: Path, open_page: Open) -> None:
    run = read_run(write_run(tmp_path / "run.jsonl", []))
    dom = open_page(build_page(run))
    assert dom.text["verdict"] == "✓Nothing is wrong: no problem was found in 5 reports"
    last = {(r.layer, r.head): r.forward["max_logit"].max for r in records() if r.step == 50}
    layer, head = max(last, key=lambda place: last[place])
    assert dom.text["readout"].startswith(f"Step 50 · {layer} · head {head}: maximum of largest logit ")


ALL_NUMBERS = """
(async () => {
  const content = JSON.parse(document.getElementById("content").textContent);
  while (!document.documentElement.dataset.ready) await later();
  for (const { phase, name, statistic } of content.runs[0].planes) {
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
    # Four digits are shown, and three of what is below 1e-3.
    check_numbers(found, lambda _, name, __: (5.1e-3 if name in ("gain", "score_gradient") else 5.1e-4, 0.0))


@browser
def test_numbers_of_a_large_run_are_rounded_but_right(run_file: Path, open_page: Open) -> None:
    run = read_run(run_file)
    budget = sum(len(plane.text) for plane in encode(run, 0)[2])  # two steps in the least detail
    while encode(run, budget)[0].steps != run.steps:
        budget = int(budget * 1.05)
    assert encode(run, budget)[1] == DETAILS[-1]
    dom = open_page(build_page(run, budget=budget), program=NOTES + ALL_NUMBERS)
    assert "rounded" in dom.text["footer"]
    found = notes(dom)
    others = {"max", "p50"}  # of the largest logit and the largest weight
    assert {statistic for _, _, statistic, *_ in found} == {"mean", "p10", "p90", "value", *others}

    def tolerance(phase: str, name: str, statistic: str) -> tuple[float, float]:
        plane = run.planes[Key(phase, name, statistic)]
        other = run.planes.get(Key("backward" if phase == "forward" else "forward", name, statistic), plane)
        finite = torch.cat([plane, other])
        finite = finite[finite.isfinite()]
        levels = 252 if statistic in ("p10", "p90") else 65532
        if finite.min() > 0 and finite.max() / finite.min() > 1000:
            return 5.1e-3 + float((finite.max() / finite.min()).log()) / levels, 0.0
        return 5.1e-4, 0.51 * float(finite.max() - finite.min()) / levels

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
  await note("line", () => document.querySelectorAll("#verdict li button")[1].click());
  await note("bar", () => document.querySelector("#timeline .bar").click());
  await note("name", () => document.querySelector("#plot-of-w_max-forward h3 button").click());
  await note("lines", () => set("lines", "layers"));
  notes.push(["drawn", document.querySelectorAll("#curve polyline").length]);
  const address = "theme=dark&quantity=w_max&statistic=mean&step=21&layer=blocks.0.x.attn&head=1&lines=head";
  await note("dark", () => { location.hash = address; });
  notes.push(["theme", document.documentElement.dataset.theme]);
  notes.push(["cell", move(heads, 0.45, 0.1)], ["outside", move(heads, 0.5, 0.99)], ["curve", move(curve, 0.99, 0.5)]);
  keep();
})();
"""


@browser
def test_keys_pointer_controls_and_address_choose_what_is_shown(page: str, open_page: Open) -> None:
    start = "step=50&layer=blocks.0.x.attn&head=0"
    found = notes(open_page(page, start, program=NOTES + INTERACT))
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
        "line": f"Step 20 · {EVIL} · head 2",
        "bar": shown["name"][0].split(": ")[0],
        "name": shown["bar"][0].split(": ")[0],
        "lines": shown["bar"][0].split(": ")[0],
        "dark": "Step 20 · blocks.0.x.attn · head 1",
    }
    assert "gain" in shown["quantity"][0]
    assert "quantity=scalar.gain" in shown["quantity"][1]
    assert "maximum of largest logit" in shown["line"][0]
    assert "event: logits jumped" in shown["line"][0]
    assert "quantity=forward.max_logit" in shown["line"][1]
    assert shown["bar"][0].startswith("Step 40")
    assert "event: entropy collapse" in shown["bar"][0]
    assert "median of largest weight w_max" in shown["name"][0]
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


NARROW = """(async () => {
  while (!document.documentElement.dataset.ready) await later();
  notes.push(innerWidth, document.documentElement.scrollWidth);
  keep();
})();"""


@browser
def test_a_phone_needs_no_sideways_scrolling(page: str, open_page: Open) -> None:
    inner, needed = notes(open_page(page, "more=open", program=NOTES + NARROW, width=390))
    assert needed <= inner <= 500  # a window of chromium may have a minimum width


@browser
def test_a_run_of_one_step_and_one_head_without_backward_is_drawn(open_page: Open, tmp_path: Path) -> None:
    forward = {"w_max": spread(0.5), "mine": spread(-3), "first_share": spread(0.8), "criticality": spread(3)}
    path = lines(tmp_path, record_lines(Record(5, "attn", 0, forward)))
    dom = open_page(build_page(read_run(path)), "quantity=mine&more=open")
    assert "Step 5 · attn · head 0: mean of mine −3" in dom.text["readout"]
    assert "attention sink: 80 % of the weight is on the first keys" in dom.text["readout"]
    assert "Attention sink: r tells how clearly the first key wins" in dom.text["main"]
    assert "0 · sink" in dom.text["head"]
    assert "This run has no backward records." in dom.text["hint-both"]
    assert "Nothing is wrong" in dom.text["verdict"]


@browser
def test_several_runs_share_axes_and_each_has_its_verdict(tmp_path: Path, open_page: Open) -> None:
    first = read_run(write_run(tmp_path / "first.jsonl", []))
    loss = [3.0, 2.0, None, math.nan, 1.0]
    second = replace(read_run(write_run(tmp_path / "second.jsonl")), loss=loss, lr=[1e-3] * 5)
    program = """(async () => {
      while (!document.documentElement.dataset.ready) await later();
      const labels = (id) => [...document.querySelectorAll(`#plot-of-${id} polyline`)].map((one) => one.dataset.label);
      notes.push(labels("w_max-forward"), labels("loss-"), document.getElementById("of-run").value);
      const select = document.getElementById("of-run"), readout = document.getElementById("readout");
      notes.push(readout.textContent);
      await after(() => { select.value = 0; select.dispatchEvent(new Event("change")); });
      notes.push(readout.textContent, innerWidth, document.documentElement.scrollWidth);
      keep();
    })();"""
    dom = open_page(build_page(first, second), program=NOTES + program, width=390)
    both, losses, chosen, before, now, inner, needed = notes(dom)
    assert both == ["first.jsonl", "second.jsonl"]
    assert losses == ["second.jsonl"]  # a line of two points; the third stands alone
    assert chosen == "1"  # the run with an event
    assert before.removeprefix("second.jsonl").partition(":")[0] == now.removeprefix("first.jsonl").partition(":")[0]
    assert needed <= inner
    words = dom.text["verdict"]
    assert words.index("first.jsonl") < words.index("Nothing is wrong") < words.index("second.jsonl")
    assert words.index("second.jsonl") < words.index("Entropy collapse")
    assert len(dom.all("button", "bar")) == 2
    assert len(dom.all("canvas")) == 2 * 2 + 1


@pytest.mark.parametrize(
    ("limits", "drawn"),
    [
        ([Thresholds(collapsed=0.7)], 0.7),
        ([Thresholds(collapsed=None)], None),
        ([None], None),
        ([Thresholds(collapsed=0.7), Thresholds(collapsed=0.7)], 0.7),
        ([Thresholds(collapsed=0.7), Thresholds()], None),
    ],
    ids=["its own", "disabled", "no events", "the same", "two different ones"],
)
def test_curves_show_the_limits_of_the_run(
    tmp_path: Path, limits: list[Thresholds | None], drawn: float | None
) -> None:
    paths = []
    for number, of_run in enumerate(limits):
        paths.append(tmp_path / f"{number}.jsonl")
        attention, q = ScaledDotProductAttention(), torch.randn(1, 2, 6, 4)
        with Monitor(attention, every=1, sinks=[JsonlSink(paths[-1])], alerts=of_run) as monitor:
            attention(q, q, q)
            monitor.step(0)
    content = json.loads(build_page(*map(read_run, paths)).split('id="content">')[1].split("</script>")[0])
    (w_max,) = (one for one in content["quantities"] if (one["phase"], one["name"]) == ("forward", "w_max"))
    assert (w_max["limit"] or {"value": None})["value"] == drawn


def test_nothing_in_the_page_comes_from_elsewhere(page: str) -> None:
    without_numbers = re.sub(r'<script type="text/plain" class="plane">[^<]*</script>', "", page)
    assert re.findall(r"https?:|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(", without_numbers) == []
    assert "default-src 'none'" in without_numbers


def test_a_run_that_was_resumed_counts_what_it_did_again(tmp_path: Path) -> None:
    content = b""
    for step, w_max in ((0, 0.1), (5, 0.2), (10, 0.3), (5, 0.6), (10, 0.7)):
        content += record_lines(Record(step, "attn", 0, {"w_max": spread(w_max)}))
        if w_max == 0.3:
            content += event_lines(replace(JUMP, start=10, step=10))
    run = read_run(lines(tmp_path, content))
    assert run.steps == [0, 5, 10]
    assert run.planes[Key("forward", "w_max", "mean")].flatten().tolist() == pytest.approx([0.1, 0.6, 0.7])
    assert run.events == []


def test_a_record_less_what_others_have_leaves_gaps_and_shifts_nothing(run_file: Path) -> None:
    run, expected = read_run(run_file), known()
    assert run.columns == [(layer, head) for layer, heads in LAYERS.items() for head in range(heads)]
    for key, plane in run.planes.items():
        for row, step in enumerate(run.steps):
            for column, (layer, head) in enumerate(run.columns):
                value = value_of(expected[step, layer, head], *key)
                single = struct.unpack("f", struct.pack("f", value))[0]
                assert plane[row, column].item() == pytest.approx(single, rel=0, abs=0, nan_ok=True)


def test_messages_about_an_event_become_one_event_and_the_worst_comes_first() -> None:
    spreading = replace(JUMP, status="lasting", step=30, places=((EVIL, (1, 2)),))
    over = replace(spreading, status="over", step=50)
    again = replace(JUMP, start=60, step=60)  # the same number in a resumed run
    assert merged([JUMP, spreading, COLLAPSE, over, again]) == [COLLAPSE, over, again]
    # Not over when the run was resumed: the problem goes on.
    assert merged([JUMP, replace(again, places=((EVIL, (0,)),))]) == [
        replace(JUMP, step=60, places=((EVIL, (0, 2)),)),
    ]
    assert merged([COLLAPSE, replace(COLLAPSE, number=0)]) == [COLLAPSE, replace(COLLAPSE, number=0)]


def test_alerts_of_older_versions_become_events(tmp_path: Path) -> None:
    def alert(kind: str, step: int, layer: str, head: int, value: object) -> bytes:
        about = {"kind": kind, "step": step, "layer": layer, "head": head, "value": value, "limit": 100.0, "row": None}
        return line({"kind": "alert", "alert": {**about, "message": f"it is {value}"}})

    path = write_run(tmp_path / "run.jsonl", [])
    old = [
        alert("exploding", 20, EVIL, 2, 200.0),
        alert("broken", 40, EVIL, 1, "nan"),
        alert("exploding", 50, EVIL, 0, "inf"),
    ]
    path.write_bytes(path.read_bytes() + b"".join(old))
    broken, exploding = read_run(path).events
    assert (broken.cause, broken.severity, broken.start) == ("nan", "critical", 40)
    assert (exploding.cause, exploding.start, exploding.places) == ("exploding", 20, ((EVIL, (0, 2)),))
    content = json.loads(re.findall(r'id="content">(.*?)</script>', build_page(read_run(path)))[0])
    shown = content["runs"][0]["events"][1]
    assert shown["message"].startswith("it is 200.0 in heads 0, 2 of ")
    assert shown["message"].endswith(", since step 20")
    assert shown["advice"] == CAUSES["exploding"].advice


@pytest.mark.parametrize(
    ("value", "usual", "worst"), [(0.9, 0.2, 2), (0.1, 0.2, 1), (0.6, math.nan, 3), (None, None, 1)]
)
def test_the_worst_head_has_the_clearest_value_at_the_first_step(
    value: float | None, usual: float | None, worst: int
) -> None:
    columns = [("attn", head) for head in range(4)]
    planes = {
        Key("scalar", "token_angle", "value"): torch.tensor([[0.0] * 4, [5.0, 0.3, 0.8, 0.5], [9.0, 9.0, 9.0, 0.0]])
    }
    event = replace(JUMP, start=10, places=(("attn", (1, 2, 3)),), quantity="token_angle", value=value, usual=usual)
    assert Run("run.jsonl", [0, 10, 20], columns, planes).worst(event) == worst


def test_the_worst_head_of_an_event_with_nan_is_one_that_has_it() -> None:
    planes = {Key("scalar", "broken_row", "value"): torch.tensor([[math.nan, math.nan, 3.0]])}
    event = replace(JUMP, start=0, places=(("attn", ()),), quantity="broken_row", value=math.nan, usual=3.0)
    assert Run("run.jsonl", [0], [("attn", head) for head in range(3)], planes).worst(event) == 2


def test_thinning_keeps_the_ends_and_the_start_of_an_event(run_file: Path) -> None:
    run = read_run(run_file)
    assert run.thinned(2).steps == [0, 50]
    steps = list(range(0, 1000, 10))
    event = replace(JUMP, start=30)
    long = Run("run.jsonl", steps, [("attn", 0)], {}, [event], loss=[float(step) for step in steps])
    thin = long.thinned(5)
    assert thin.steps == [0, 30, 330, 660, 990]
    assert (thin.loss, thin.reports) == ([0.0, 30.0, 330.0, 660.0, 990.0], 100)


def test_loss_and_learning_rate_are_those_of_the_report(tmp_path: Path) -> None:
    known = {"loss": 2.5, "lr": 0.1}
    reports = [Report.of([Record(step, "attn", 0)], step, **(known if step else {})) for step in (0, 1)]
    run = read_run(lines(tmp_path, b"".join(line({"kind": "report", **report.as_dict()}) for report in reports)))
    assert (run.steps, run.loss, run.lr) == ([0, 1], [None, 2.5], [None, 0.1])


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


def test_a_page_of_a_large_model_stays_below_20_mb() -> None:
    # As for 48 layers of 32 heads: a hundredth of the budget for a hundredth of the heads, and noise for numbers.
    generator = torch.Generator().manual_seed(0)
    columns = [("attn", head) for head in range(15)]
    planes = {
        Key(phase, f"quantity_{index}", statistic): torch.rand(200, 15, generator=generator)
        for phase, number in (("forward", 14), ("backward", 9))
        for index in range(number)
        for statistic in STATISTICS
    }
    text = build_page(Run("run.jsonl", list(range(200)), columns, planes), budget=175_000)
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


GOOD = record_lines(Record(0, "attn", 0, {"w_max": spread(0.5)}))
MISTAKES: dict[str, tuple[bytes | None, str]] = {
    "an existing file of reports": (None, "page.html"),
    "a file of reports": (b"", "page.html"),
    "contains at least one report": (GOOD[:-1], "page.html"),
    "at least one report": (event_lines(JUMP), "page.html"),
    "one report": (b"[1, 2]\nnonsense\n", "page.html"),
    "at least one report that can be read": (GOOD.replace(b'"mean": 0.5', b'"mean": [0.5]'), "page.html"),
    "an HTML file, not a directory": (GOOD, "folder"),
    "a file other than the JSONL file": (GOOD, "run.jsonl"),
    "cannot be written": (GOOD, "run.jsonl/page.html"),
}
UNREADABLE = (
    GOOD.replace(b'"mean": 0.5', b'"mean": [0.5]'),
    b"nonsense\n",
    b"[1, 2]\n",
    b"null\n",
    b"[" * 100_000 + b"\n",
    b'{"kind": "record"}\n',
    GOOD.replace(b'"step": 0', b'"step": "first"'),
    event_lines(JUMP).replace(b'"start": 20', b'"start": []'),
)


@browser
def test_lines_that_cannot_be_read_are_counted_and_names_are_escaped(tmp_path: Path, open_page: Open) -> None:
    odd = Record(10, "a\x1b[2J\u202e<b>", 0, {"w_max": spread(0.2)})
    path = lines(tmp_path, GOOD + b"".join(UNREADABLE) + record_lines(odd) + GOOD[:-9])
    run = read_run(path)
    assert run.unreadable == len(UNREADABLE)
    assert run.columns == [("attn", 0), ("a\\x1b[2J\\u202e<b>", 0)]
    assert f"{len(UNREADABLE)} unreadable lines" in open_page(build_page(run)).text["about"]


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


def test_a_comparison_lies_beside_the_first_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        shutil.copy(run_file, Path(folder, "attn.jsonl"))
    shutil.copy(run_file, Path("a", "other.jsonl"))
    assert main(["report", "a/attn.jsonl", "b/attn.jsonl"]) == 0
    assert main(["report", "a/attn.jsonl", "a/other.jsonl"]) == 0
    assert capsys.readouterr().out == "wrote a/a-attn_vs_b-attn.html\nwrote a/attn_vs_other.html\n"
    assert main(["report", "a/attn.jsonl", "a/../a/attn.jsonl"]) == 2
    assert "each file once" in capsys.readouterr().err
    assert main(["report", "a/attn.jsonl", "b"]) == 2
    assert "JSONL files of records" in capsys.readouterr().err


def test_an_earlier_page_survives_a_failure(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "page.html"
    output.write_text("earlier")
    monkeypatch.setattr("attnscale._util.files.os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(ValueError, match="disk full"):
        write_report(run_file, output)
    assert output.read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
