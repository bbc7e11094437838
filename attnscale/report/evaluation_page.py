"""The page of an evaluation: verdict, charts, all numbers, and how to reproduce them."""

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
    RETRIEVING,
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
from attnscale.report.terms import TERMS
from attnscale.report.verdict import verdict

PROGRAMS = ("content.js", "scales.js", "plot.js", "heatmap.js", "evaluation.js")


def build_evaluation_page(data: EvaluationData) -> str:
    """Build the HTML page of an evaluation. Sections without measurements are omitted.

    Args:
        data: the results, from `read_evaluation`.

    Returns:
        The page as text.

    Example:
        >>> from pathlib import Path
        >>> row = ResultRow("recall", "accuracy", "mine", "constant", 128, "", 0.5, None, None, None, None, None)
        >>> build_evaluation_page(EvaluationData(Path("."), [row], [], [], {})).splitlines()[0]
        '<!DOCTYPE html>'
    """
    sections = (_verdict, _trades, _curves, _criticality, _heads, _positions, _depths, _table, _reproduction)
    about = f"{len(data.policies)} policies, {data.lengths[0]} to {data.lengths[-1]} tokens"
    several = data.shown_model == ALL and len(data.models) > 1
    names = f"mean over {len(data.models)} models" if several else f"model {(data.models or [ALL])[0]}"
    trained = "" if data.trained_length is None else f", trained length {data.trained_length}"
    return fill(
        "evaluation.html",
        kind="Evaluation",
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
    """Return a section with its explanation to the right of its charts on wide screens; empty without charts."""
    drawn = "".join(_drawn(chart) for chart in charts if chart is not None)
    text = f'<div class="hint">{hint}{legend}</div>'
    return _section(name, title, "", f'<div class="beside"><div>{drawn}</div>{text}</div>') if drawn else ""


def _panel(title: str, inner: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{inner}</figure>"


def _drawn(chart: Chart) -> str:
    return _panel(chart.title, svg(chart))


def _explain(*terms: str) -> str:
    """Return the sentences of terms, with each term highlighted at its first occurrence."""
    found = []
    for term in terms:
        place = rf"(?<!\w){re.escape(term)}(?!\w)"
        found.append(re.sub(place, r"<dfn>\g<0></dfn>", escape(TERMS[term]), count=1, flags=re.IGNORECASE))
    return " ".join(found)


def _verdict(data: EvaluationData) -> str:
    found = verdict(data)
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in found.sentences)
    sentences += "" if found.line is None else f'<p><code id="line">{escape(found.line)}</code></p>'
    terms = _explain("β", "n", "trained length", "bits per byte", "paired difference")
    body = f'<div id="sentences">{sentences}</div><p class="hint">{terms}</p>{_policy_legend(data)}'
    return _section("verdict", "Verdict", "", body)


def _trades(data: EvaluationData) -> str:
    hint = (
        "Gain in retrieval against cost in bits per byte, both as paired differences to constant. There is one point "
        "per length, joined from shortest to longest; the label is at the longest. Up and left is better. Thin lines "
        "are 95 % intervals."
    )
    hint += " The policy argmax is omitted." if ARGMAX in data.policies else ""
    return _beside("pareto", "Gain against cost", hint, [trade_chart(data, task) for task in data.retrieval_tasks])


def _curves(data: EvaluationData) -> str:
    panels = [_drawn(task_chart(data, task)) for task in data.tasks]
    hint, choice = "Shaded bands are 95 % intervals.", ""
    task = statistics_task(data)
    if task is not None:
        heads = retrieving_heads(data, task)
        several = " Lines are medians over models, bands their range." if len(data.models) > 1 else ""
        hint += (
            f" {_explain('w_max', 'entropy', 'Λ', 'r')} These four quantities are medians over the rows of {task} that "
        )
        hint += f"{TASKS[task].measured_rows}.{several} {_named(heads) if task in data.retrieval_tasks else ''}"
        choice, more = _head_panels(data, task, heads)
        panels.append(more)
    return _section("curves", "Over context length", hint, f'{choice}<div class="plots three">{"".join(panels)}</div>')


def _named(heads: dict[str, Head]) -> str:
    """Return the definition of the retrieving head and its location in each model, or that there is none."""
    where = "; ".join(f"{escape(layer)} head {head} of {escape(model)}" for model, (layer, head) in heads.items())
    return f"{RETRIEVING} Here: {where or 'no head retrieves'}."


def _head_panels(data: EvaluationData, task: str, heads: dict[str, Head]) -> tuple[str, str]:
    """Return the head selector and the charts for each option."""
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
        "One point per model, policy and length. If accuracy depended on r alone, all points would lie on one rising "
        "curve, for every policy and length. The dashed line is r = 1. Spearman's rank correlation is 1 if accuracy "
        "always rises with r, and 0 if there is no monotonic relation."
    )
    charts = [criticality_chart(data, task) for task in data.retrieval_tasks]
    return _beside("criticality", "Accuracy against criticality", hint, charts, _policy_legend(data))


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
    task = statistics_task(data)
    frame = " The retrieving head is selected initially." if task and retrieving_heads(data, task) else ""
    hint = (
        f"Each cell is the median of one head.{frame} The colour scale covers all policies and lengths, so that maps "
        "are comparable. Click a cell or use the arrow keys to read its values."
    )
    return _section("heads", "Layer × head", hint, body)


def _positions(data: EvaluationData) -> str:
    hint = "Bits per byte of tokens at each position of the longest text."
    return _beside("positions", "Bits per byte by position", hint, [position_chart(data)])


def _depths(data: EvaluationData) -> str:
    """Return the accuracy by depth and length, for each task and policy."""
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
        "Accuracy in per cent. Rows: depth of the needle, from 0 (beginning of the text) to 1 (end). Columns: length "
        "in tokens."
    )
    body = f'<div class="plots three">{panels}</div>'
    return _section("depths", "Accuracy by depth", hint, body) if panels else ""


def _table(data: EvaluationData) -> str:
    """Return the table of all results, with one row per length and policy."""
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
        "95 % intervals are in parentheses. Differences are paired differences to constant, in bold if the interval "
        "excludes zero. Seconds are the time for one sequence of each task and model on the machine of this run."
    )
    table = f'<div class="scroll"><table id="results">{top}<tbody>{"".join(lines)}</tbody></table></div>'
    return _section("table", "All numbers", hint, table)


def _reproduction(data: EvaluationData) -> str:
    """Return the command, versions and fingerprints of run.json, and the files of the folder."""
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
    """Return the legend: line, marker and parameters of each policy."""
    known = data.run.get("policies")
    lines = []
    for index, policy in enumerate(data.policies):
        found = known.get(policy) if isinstance(known, Mapping) else None
        found = {key: value for key, value in found.items() if value != policy} if isinstance(found, Mapping) else found
        what = f'<span class="quiet">{escape(_listed(found))}</span>' if found else ""
        lines.append(f"<li>{swatch(style(index))} <b>{escape(policy)}</b> {what}</li>")
    return f'<ul class="policies">{"".join(lines)}</ul>'


def _listed(found: object) -> str:
    """Format a mapping as "key value, key value", without None values."""
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
    """Return the total seconds over tasks and models, and their peak memory."""
    found = {}
    for key in {(row.policy, row.length) for row in data.cost}:
        own = [row for row in data.cost if (row.policy, row.length) == key]
        seconds = [row.seconds for row in own if row.seconds is not None]
        memory = [row.peak_mb for row in own if row.peak_mb is not None]
        found[key] = (short(sum(seconds)) if seconds else "", f"{max(memory):.0f}" if memory else "")
    return found
