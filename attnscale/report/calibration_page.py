"""The page of a calibration: verdict, the growth of Λ and r of the heads that retrieve, all heads, held-out results."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from attnscale import __version__
from attnscale.errors import ArgumentError
from attnscale.policies import build_policy
from attnscale.report.chart import Chart, Mark, Point, Series, lengths_axis, logarithmic, short, style
from attnscale.report.drawing import svg, swatch
from attnscale.report.page import asset, fill

DESCRIPTION, HEADS, SCALES, HELD_OUT = "calibration.json", "heads.csv", "scales.csv", "held_out.csv"

# At most so many heads get charts, those with the largest weight on the answers first, and rows in the table.
CHARTS, ROWS = 6, 40

SHOWN_LAWS = ("constant", "log", "log_squared")
PROGRAMS = ("content.js", "scales.js", "plot.js", "heatmap.js", "evaluation.js")

METRICS = ("accuracy", "nats_per_answer_token", "bits_per_byte")


class CalibrationData(NamedTuple):
    """The content of a calibration folder."""

    path: Path
    about: Mapping[str, Any]
    heads: Sequence[Mapping[str, str]]
    scales: Sequence[Mapping[str, str]]
    held_out: Sequence[Mapping[str, str]]

    @property
    def trained(self) -> int:
        return int(self.about["trained_length"])

    @property
    def target(self) -> int:
        return int(self.about["options"]["to"])

    @property
    def retrieving(self) -> list[Mapping[str, Any]]:
        """The heads that retrieve, with the largest weight on the answers first."""
        return sorted(self.about["retrieving"], key=lambda head: -head["weight"])


def is_calibration(folder: Path) -> bool:
    """Whether a folder is the output of `attnscale calibrate`."""
    return (folder / DESCRIPTION).is_file()


def read_calibration(folder: str | Path) -> CalibrationData:
    """Read the output folder of `attnscale calibrate`; raise if a file is missing or broken."""
    path = Path(folder)
    try:
        about = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        texts = [(path / name).read_text(encoding="utf-8") for name in (HEADS, SCALES, HELD_OUT)]
        tables = [list(csv.DictReader(text.splitlines())) for text in texts]
        data = CalibrationData(path, about, *tables)
        _ = data.trained, data.target, data.retrieving
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: expected the output folder of attnscale calibrate ({error})"
        ) from error
    return data


def summary_sentences(data: CalibrationData) -> list[str]:
    """Return the verdict, where each head loses its keys, and the line to paste."""
    about, found = data.about, []
    if not data.retrieving:
        found.append(f"No head retrieves: {about['criterion']}. Nothing was calibrated.")
    for head in data.retrieving[:CHARTS]:
        found.append(f"{_name(head)} {lost(head)}.")
    for one in about["verdict"].values():
        found += one["sentences"]
    if about["options"]["fit"] and "fitted" not in about["plans"]:
        found.append("The fit did not improve the validation loss over β = 1, so no fitted plan was written.")
    if about["helped"]:
        found.append(f'To use it: attnscale.hf.apply(model, "{data.path / "policy.yaml"}")')
    return found


def lost(head: Mapping[str, Any]) -> str:
    """Return in words at which length a head loses its keys.

    >>> lost({"lost_between": [1000.4, 5000.0], "decided": None})
    'loses its keys (r < 1) between 1000 and 5000 tokens under β = 1; the data do not decide the form of growth'
    """
    low, high = head["lost_between"]
    form = {"power": "; Λ grows as a power of n", "log": "; Λ grows as a power of ln n"}
    known = form.get(head["decided"] or "", "; the data do not decide the form of growth")
    if low is None:
        return f"does not lose its keys under β = 1{known}"
    ends = (
        f"between {low:.0f} and {high:.0f} tokens" if high is not None else f"at {low:.0f} tokens or later, if at all,"
    )
    return f"loses its keys (r < 1) {ends} under β = 1{known}"


def build_calibration_page(data: CalibrationData) -> str:
    """Build the HTML page of a calibration."""
    sections = (_verdict, _growth, _criticality, _held_out, _heads, _reproduction)
    name = data.about["model"]["name"]
    return fill(
        "evaluation.html",
        kind="Calibration",
        title=escape(data.path.resolve().name),
        about=escape(f"model {name} · trained length {data.trained} · target {data.target} tokens"),
        style=asset("page.css") + asset("evaluation.css"),
        sections="\n".join(section(data) for section in sections),
        footer=escape(f"{data.path} · attnscale {__version__}"),
        content={"colours": [], "quantities": [], "labels": {}, "policies": [], "lengths": [], "models": []},
        programs="\n".join(asset(name) for name in PROGRAMS),
    )


def _section(name: str, title: str, hint: str, body: str) -> str:
    hint = f'<p class="hint">{hint}</p>' if hint else ""
    return f'<section id="{name}" class="full"><h2>{title}</h2>{hint}{body}</section>'


def _verdict(data: CalibrationData) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in summary_sentences(data))
    return _section("verdict", "Verdict", "", f'<div id="sentences">{sentences}</div>')


def _growth(data: CalibrationData) -> str:
    """Return Λ against n for the heads that retrieve, with the bracket of the two forms."""
    hint = (
        "Points: Λ measured without the first keys (median and 95 % interval over sequences). Lines: a power of n and "
        "a power of ln n; the band spans the intervals of both. Under β = 1 a head loses its keys where Λ crosses 1."
    )
    charts = growth_charts(data)
    body = f'<div class="plots three">{"".join(map(_drawn, charts))}</div>'
    return _section("growth", "Λ of the heads that retrieve", hint, body) if charts else ""


def growth_charts(data: CalibrationData) -> list[Chart]:
    """Return one chart of Λ per head that retrieves."""
    charts = []
    for head in data.retrieving[:CHARTS]:
        rows = [row for row in data.scales if row["layer"] == head["layer"] and int(row["head"]) == head["head"]]
        measured = [
            Point(float(r["length"]), float(r["accumulation"]), float(r["low"]), float(r["high"]), tip=r["length"])
            for r in rows
        ]
        curve = head["curve"]
        band = [Point(p["length"], p["power"], p["low"], p["high"], tip=short(p["power"])) for p in curve]
        log = [Point(p["length"], p["log"], tip=short(p["log"])) for p in curve]
        series = [
            Series("power of n", style(1), band),
            Series("power of ln n", style(2), log),
            Series("measured", style(0), measured, joined=False, shaded=False),
        ]
        values = [x for p in (*measured, *band, *log) for x in (p.y, p.low, p.high) if x is not None]
        lengths = [p.x for p in (*measured, *band)]
        marks = [Mark("trained", x=float(data.trained)), Mark("r = 1 under β = 1", y=1.0)]
        charts.append(Chart(_name(head), series, lengths_axis("n", lengths), logarithmic("Λ", [*values, 1.0]), marks))
    return charts


def _criticality(data: CalibrationData) -> str:
    hint = "r = β/Λ with the power of n. Below 1 a head loses its keys."
    charts = criticality_charts(data)
    legend = "".join(f"<li>{swatch(style(i))} <b>{escape(name)}</b></li>" for i, name in enumerate(_laws(data)))
    body = f'<div class="plots three">{"".join(map(_drawn, charts))}</div><ul class="policies">{legend}</ul>'
    return _section("criticality", "r under each law", hint, body) if charts else ""


def _laws(data: CalibrationData) -> tuple[str, ...]:
    return (*SHOWN_LAWS, *data.about["plans"])


def criticality_charts(data: CalibrationData) -> list[Chart]:
    """Return one chart of r per head that retrieves."""
    charts = []
    for head in data.retrieving[:CHARTS]:
        series = []
        for index, name in enumerate(_laws(data)):
            points = [
                Point(p["length"], _beta(data, head, name, int(p["length"])) / p["power"], tip=name)
                for p in head["curve"]
            ]
            series.append(Series(name, style(index), points))
        values = [point.y for one in series for point in one.points]
        lengths = [point.x for one in series for point in one.points]
        marks = [Mark("r = 1", y=1.0)]
        charts.append(Chart(_name(head), series, lengths_axis("n", lengths), logarithmic("r", [*values, 1.0]), marks))
    return charts


def _beta(data: CalibrationData, head: Mapping[str, Any], name: str, length: int) -> float:
    """Return β of a law or plan for a head."""
    if name not in data.about["plans"]:
        anchor = {} if name == "constant" else {"reference_length": data.trained, "floor": True}
        return float(build_policy(name, **anchor)(length))
    from attnscale.hf.plan import read_plan
    from attnscale.policies.record import split_number

    plan = read_plan(data.about["plans"][name])
    heads = max(int(row["head"]) for row in data.heads if row["layer"] == head["layer"]) + 1
    policy: Any = plan.build(split_number(head["layer"])[1] or 0, num_heads=heads, head_dim=1)
    beta = policy(length).flatten()
    return float(beta[head["head"]] if len(beta) > 1 else beta[0])


def _held_out(data: CalibrationData) -> str:
    hint = (
        "Text and prompts that were used for nothing else, at the target length. Bits per byte are those beyond the "
        "trained length. In parentheses: 95 % intervals of the paired difference to constant."
    )
    rows = [row for row in data.held_out if not row["bin"]]
    kinds = [(kind, metric) for kind in ("needles", "text") for metric in METRICS]
    shown = [kind for kind in kinds if any((row["task"], row["metric"]) == kind for row in rows)]
    head = ["policy", *(f"{metric.replace('_', ' ')}, {kind}" for kind, metric in shown)]
    body = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [escape(policy)]
        for kind in shown:
            found = next((r for r in rows if (r["task"], r["metric"]) == kind and r["policy"] == policy), None)
            cells.append("" if found is None else _difference(found))
        body.append(cells)
    bins = [row for row in data.held_out if row["bin"] and row["metric"] == "bits_per_byte"]
    places = list(dict.fromkeys(row["bin"] for row in bins))
    task = bins[0]["task"] if bins else ""
    more = [
        [escape(policy), *(_bits(bins, task, policy, place) for place in places)]
        for policy in dict.fromkeys(row["policy"] for row in bins)
    ]
    by_position = (
        f"<h3>Bits per byte by position, {escape(task)}</h3>{_table(['policy', *places], more)}" if more else ""
    )
    return _section("held_out", "Held-out data", hint, _table(head, body) + by_position)


def _bits(rows: Iterable[Mapping[str, str]], task: str, policy: str, place: str) -> str:
    found = [r for r in rows if (r["task"], r["policy"], r["bin"]) == (task, policy, place)]
    return f"{float(found[0]['value']):.4f}" if found else ""


def _difference(row: Mapping[str, str]) -> str:
    value = f"{float(row['value']):.4f}"
    if not row["difference"]:
        return value
    low, high = float(row["difference_low"]), float(row["difference_high"])
    text = f"{float(row['difference']):+.4f}"
    clear = f"<b>{text}</b>" if low > 0 or high < 0 else text
    return f'{value} {clear} <span class="quiet">({low:+.4f} to {high:+.4f})</span>'


def _heads(data: CalibrationData) -> str:
    hint = (
        f"{escape(data.about['criterion'])}. r is 1/Λ at the first measured length, without the first keys and with "
        f"them; “lost at” is the length with r = 1 under β = 1, by form. The {ROWS} heads with the largest weight, "
        "or the smallest r where no prompts were read."
    )
    ordered = sorted(data.heads, key=lambda row: (-_number(row["weight"]), _number(row["criticality"])))[:ROWS]
    columns = (
        *("weight", "criticality", "criticality_with_first", "power", "log", "power_share"),
        *("lost_at_power", "lost_at_log"),
    )
    body = [
        [
            escape(_name(row)),
            row["rows_of"],
            *(short(_number(row[column])) if row[column] else "" for column in columns),
        ]
        for row in ordered
    ]
    titles = ["head", "rows of", "weight", "r", "r with first keys", "exponent of n", "exponent of ln n"]
    titles += ["power preferred", "lost at, power", "lost at, log"]
    return _section("heads", "Heads", hint, _table(titles, body))


def _reproduction(data: CalibrationData) -> str:
    given = {key: value for key, value in data.about["options"].items() if value not in (None, [], "")}
    text = ", ".join(f"{key} {value}" for key, value in given.items())
    return _section("reproduce", "How to reproduce", "", f"<p><code>{escape(text)}</code></p>")


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th class="number">{escape(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f'<td class="number">{cell}</td>' for cell in row) + "</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _drawn(chart: Chart) -> str:
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{svg(chart)}</figure>"


def _name(head: Mapping[str, Any]) -> str:
    return f"{head['layer']} head {head['head']}"


def _number(text: str) -> float:
    return float(text) if text else 0.0
