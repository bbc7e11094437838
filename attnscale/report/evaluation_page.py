"""The page of an evaluation: verdict, charts, and all numbers with what reproduces them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape

from attnscale import __version__
from attnscale.lab.tasks import TASKS
from attnscale.report.chart import Chart, short, style
from attnscale.report.drawing import grid, svg, swatch
from attnscale.report.evaluation_charts import (
    HEAD_QUANTITIES,
    MAPS,
    Format,
    Head,
    criticality_chart,
    head_chart,
    head_maps,
    position_chart,
    retrieving_heads,
    statistics_task,
    task_chart,
    texts,
    trade_chart,
)
from attnscale.report.evaluation_data import ALL, ARGMAX, PROSE, EvaluationData, ResultRow
from attnscale.report.page import asset, fill
from attnscale.report.verdict import verdict

PROGRAMS = ("content.js", "scales.js", "plot.js", "heatmap.js", "evaluation.js")

# One plain sentence for each term, shown where it first appears.
TERMS = {
    "β": "β multiplies the logits of attention before the softmax; ordinary attention has β = 1.",
    "n": "n is the number of keys that a query may see, and a law is a formula β(n).",
    "trained length": "The trained length is the longest context that the model saw in training.",
    "bits per byte": "Bits per byte say how badly the model predicts prose: fewer is better.",
    "paired difference": (
        "A paired difference compares two policies on the same sequences, so that what is hard for both cancels out; "
        "its 95 % interval is by bootstrap."
    ),
    "w_max": "w_max is the largest attention weight of a row: 1 if one key has all of it.",
    "entropy": "Entropy tells over how many keys a row spreads its weight: e to the entropy is about their number.",
    "Λ": "Λ, the accumulation scale, is the largest ln N(t)/t, where N(t) keys score within t of the best: "
    "the more rivals the best key has, the larger it is.",
    "r": "r = β/Λ, the criticality, compares the temperature with those rivals: above 1 the best key keeps its weight "
    "however many there are, below 1 they drown it.",
}


def build_evaluation_page(data: EvaluationData) -> str:
    """The whole page as text; a part that was not measured is left out."""
    sections = (_verdict, _trades, _curves, _criticality, _heads, _positions, _depths, _table, _reproduction)
    about = f"{len(data.policies)} policies, {data.lengths[0]} to {data.lengths[-1]} tokens"
    several = data.shown_model == ALL and len(data.models) > 1
    names = f"mean over {len(data.models)} models" if several else f"model {(data.models or [ALL])[0]}"
    trained = "" if data.trained_length is None else f", trained length {data.trained_length}"
    return fill(
        "evaluation.html",
        title=escape(data.path.resolve().name),
        about=escape(f"{about} · {names}{trained}"),
        style=asset("page.css") + asset("evaluation.css"),
        sections="\n".join(section(data) for section in sections),
        footer=escape(f"{data.path} · attnscale {__version__}"),
        content=head_maps(data),
        programs="\n".join(asset(name) for name in PROGRAMS),
    )


def _section(name: str, title: str, hint: str, body: str) -> str:
    hint = f'<p class="hint">{hint}</p>' if hint else ""
    heading = f'<h2 id="title-{name}">{title}</h2>'
    return f'<section id="{name}" class="full" aria-labelledby="title-{name}">{heading}{hint}{body}</section>'


def _beside(name: str, title: str, hint: str, charts: list[Chart | None], legend: str = "") -> str:
    """A section with its explanation to the right of its charts, where the window is wide enough; empty without any."""
    drawn = "".join(_drawn(chart) for chart in charts if chart is not None)
    text = f'<div class="hint">{hint}{legend}</div>'
    return _section(name, title, "", f'<div class="beside"><div>{drawn}</div>{text}</div>') if drawn else ""


def _panel(title: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{inner}</figure>"


def _drawn(chart: Chart) -> str:
    return _panel(chart.title, svg(chart))


def _explain(*terms: str) -> str:
    """The sentence of each term, with the term set off where the sentence names it first."""
    found = []
    for term in terms:
        place = rf"(?<!\w){re.escape(term)}(?!\w)"
        found.append(re.sub(place, r"<dfn>\g<0></dfn>", escape(TERMS[term]), count=1, flags=re.IGNORECASE))
    return " ".join(found)


def _verdict(data: EvaluationData) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(data))
    terms = _explain("β", "n", "trained length", "bits per byte", "paired difference")
    body = f'<div id="sentences">{sentences}</div><p class="hint">{terms}</p>{_policy_legend(data)}'
    return _section("verdict", "Verdict", "", body)


def _trades(data: EvaluationData) -> str:
    hint = (
        "What a law gains in retrieval against what it loses in prose, both as paired differences to constant: a point "
        "per length, joined from the shortest to the longest, where the name stands. Up and to the left is better; "
        "thin lines are 95 % intervals."
    )
    hint += " The bound argmax is left out." if ARGMAX in data.policies else ""
    return _beside("pareto", "Gain against cost", hint, [trade_chart(data, task) for task in data.retrieval_tasks])


def _curves(data: EvaluationData) -> str:
    panels = [_drawn(task_chart(data, task)) for task in data.tasks]
    hint, choice = "Shades are 95 % intervals.", ""
    task = statistics_task(data)
    if task is not None:
        heads = retrieving_heads(data, task)
        several = " The lines are medians over models, shades their range." if len(data.models) > 1 else ""
        hint += f" {_explain('w_max', 'entropy', 'Λ', 'r')} These four are medians over the rows of {task} that "
        hint += f"{TASKS[task].measured_rows}.{several} {_named(heads)}"
        choice, more = _head_panels(data, task, heads)
        panels.append(more)
    return _section("curves", "Against length", hint, f'{choice}<div class="plots three">{"".join(panels)}</div>')


def _named(heads: dict[str, Head]) -> str:
    """Which head is followed, and why that one."""
    if not heads:
        return ""
    where = "; ".join(f"{escape(layer)} head {head} of {escape(model)}" for model, (layer, head) in heads.items())
    return (
        "The retrieving head is the one with the largest w_max under constant at the trained length, or at the length "
        f"nearest below: {where}."
    )


def _head_panels(data: EvaluationData, task: str, heads: dict[str, Head]) -> tuple[str, str]:
    """The choice of a head, and the charts for each choice, of which one is shown."""
    choices: dict[str, dict[str, Head] | None] = {"the retrieving head": heads} if heads else {}
    choices["median over all heads"] = None
    options, parts = "", ""
    for text, chosen in choices.items():
        name, hidden = ("all" if chosen is None else "retrieving"), " hidden" if parts else ""
        options += f'<option value="{name}">{text}</option>'
        panels = "".join(_drawn(head_chart(data, task, quantity, chosen)) for quantity in HEAD_QUANTITIES)
        parts += f'<div data-which="{name}"{hidden}>{panels}</div>'
    label = '<label for="which">w_max, entropy, Λ and r of</label>'
    return f'<p class="choice">{label} <select id="which">{options}</select></p>', parts


def _criticality(data: EvaluationData) -> str:
    hint = (
        "A point per model, policy and length. If r alone decided whether a head finds its key, all points would lie "
        "on one rising curve, whatever the law and the length; the dashed line is r = 1. Spearman's rank correlation "
        "is 1 if recall always rises with r, and 0 if it does not depend on it."
    )
    charts = [criticality_chart(data, task) for task in data.retrieval_tasks]
    return _beside("criticality", "Recall against criticality", hint, charts, _policy_legend(data))


def _heads(data: EvaluationData) -> str:
    if statistics_task(data) is None:
        return ""
    controls = "".join(
        f'<span{" hidden" if name == "model" and len(data.models) < 2 else ""}><label for="map-{name}">{name}</label> '
        f'<select id="map-{name}"></select></span>'
        for name in ("policy", "length", "model")
    )
    maps = "".join(_panel(title, f'<div id="map-{name}"></div>') for name, title in MAPS.items())
    body = (
        f'<p class="choice">{controls}</p><p id="readout" aria-live="polite"></p><div class="plots three">{maps}</div>'
    )
    frame = "; the frame is first at the retrieving one" if data.retrieval_tasks else ""
    hint = (
        f"Each cell is the median of a head{frame}. Colours span all policies and lengths, so that they can be "
        "compared. Click a cell, or use the arrow keys, to read it."
    )
    return _section("heads", "Layer × head", hint, body)


def _positions(data: EvaluationData) -> str:
    hint = "How well a token is predicted, by its position."
    return _beside("positions", "Prose by position", hint, [position_chart(data)])


def _depths(data: EvaluationData) -> str:
    """For each task and policy, accuracy by depth of the answer and length."""
    panels = ""
    for task in data.retrieval_tasks:
        rows = data.binned(task)
        bins, lengths = sorted({row.bin for row in rows}), sorted({row.length for row in rows})
        for policy in data.policies:
            values = {(row.bin, row.length): row.value for row in rows if row.policy == policy}
            if values:
                cells = [[values.get((depth, length)) for length in lengths] for depth in bins]
                label = f"accuracy of {policy} by depth and length, {task}"
                panels += _panel(f"{policy}, {task}", grid(label, bins, [str(length) for length in lengths], cells))
    hint = (
        "Percent answered. Down: where the answer stands, 0 the beginning of the text and 1 its end; across: the "
        "length in tokens."
    )
    body = f'<div class="plots three">{panels}</div>'
    return _section("depths", "Accuracy by depth", hint, body) if panels else ""


def _table(data: EvaluationData) -> str:
    """A row per length and policy; a cell without a number is empty."""
    columns = [(data.whole(task), *texts(task)) for task in data.tasks]
    heads = []
    for task in data.tasks:
        metric = TASKS[task].metrics[0].name.replace("_", " ")
        heads += [metric, "difference"] if task == PROSE else [f"{task}, {metric}", "difference, points"]
    costs = _costs(data)
    heads += ["seconds", "peak MB"] if costs else []
    lines = []
    for length in data.lengths:
        for policy in data.policies:
            rows = [(found.get((policy, length)), text, change) for found, text, change in columns]
            if all(row is None for row, _, _ in rows):
                continue
            cells = [cell for row, text, change in rows for cell in (_value(row, text), _difference(row, change))]
            cells += costs.get((policy, length), ("", "")) if costs else ()
            name = f"{swatch(style(data.policies.index(policy)))} {escape(policy)}"
            numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
            mark = ' class="trained"' if length == data.trained_length else ""
            lines.append(f'<tr{mark}><td class="number">{length}</td><td>{name}</td>{numbers}</tr>')
    head = "".join(f'<th class="number">{escape(name)}</th>' for name in heads)
    top = f'<thead><tr><th class="number">length</th><th>policy</th>{head}</tr></thead>'
    hint = (
        "In brackets 95 % intervals; differences are paired, to constant, and bold where the interval leaves out zero. "
        "Seconds are for one sequence of each task and model, on the machine that ran them."
    )
    table = f'<div class="scroll"><table id="results">{top}<tbody>{"".join(lines)}</tbody></table></div>'
    return _section("table", "All numbers", hint, table)


def _reproduction(data: EvaluationData) -> str:
    """The command, the versions and the fingerprints that run.json has, and the files of the folder."""
    run, command = data.run, ""
    if isinstance(run.get("command"), str):
        command = f'<p><code id="command">{escape(run["command"])}</code></p>'
    lines = [("attnscale", str(run["attnscale"]))] if "attnscale" in run else []
    models = run.get("models")
    for name, known in models.items() if isinstance(models, Mapping) else ():
        lines.append((f"model {name}", _listed(known)))
    if isinstance(run.get("spec"), Mapping):
        lines.append(("all options", _listed(run["spec"])))
    present = sorted(path.name for path in data.path.iterdir() if path.suffix in (".csv", ".json"))
    lines.append(("files", ", ".join(present)))
    rows = "".join(f'<tr><th>{escape(name)}</th><td class="text">{escape(text)}</td></tr>' for name, text in lines)
    return _section("reproduce", "How to reproduce", "", f'{command}<div class="scroll"><table>{rows}</table></div>')


def _policy_legend(data: EvaluationData) -> str:
    """Each policy with its line, its marker and its parameters."""
    known = data.run.get("policies")
    lines = []
    for index, policy in enumerate(data.policies):
        found = known.get(policy) if isinstance(known, Mapping) else None
        found = {key: value for key, value in found.items() if value != policy} if isinstance(found, Mapping) else found
        what = f'<span class="quiet">{escape(_listed(found))}</span>' if found else ""
        lines.append(f"<li>{swatch(style(index))} <b>{escape(policy)}</b> {what}</li>")
    return f'<ul class="policies">{"".join(lines)}</ul>'


def _listed(found: object) -> str:
    """A mapping as "key value, key value"; options that were not given are left out."""
    if not isinstance(found, Mapping):
        return str(found)
    given = {key: value for key, value in found.items() if value is not None}
    return ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items())


def _value(row: ResultRow | None, text: Format) -> str:
    if row is None:
        return ""
    around = "" if row.low is None or row.high is None else f" ({text(row.low)} to {text(row.high)})"
    return f'{text(row.value)}<span class="quiet">{around}</span>'


def _difference(row: ResultRow | None, text: Format) -> str:
    if row is None or row.difference is None:
        return ""
    value = f"{'+' if row.difference > 0 else ''}{text(row.difference)}"
    if row.difference_low is None or row.difference_high is None:
        return value
    around = f'<span class="quiet"> ({text(row.difference_low)} to {text(row.difference_high)})</span>'
    clear = row.difference_low > 0 or row.difference_high < 0
    return f"<b>{value}</b>{around}" if clear else f"{value}{around}"


def _costs(data: EvaluationData) -> dict[tuple[str, int], tuple[str, str]]:
    """Seconds of all tasks and models together, and the largest memory of any of them."""
    found = {}
    for key in {(row.policy, row.length) for row in data.cost}:
        own = [row for row in data.cost if (row.policy, row.length) == key]
        seconds = [row.seconds for row in own if row.seconds is not None]
        memory = [row.peak_mb for row in own if row.peak_mb is not None]
        found[key] = (short(sum(seconds)) if seconds else "", f"{max(memory):.0f}" if memory else "")
    return found
