"""The page of an evaluation: verdict, charts, and all numbers with what reproduces them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from html import escape

from attnscale import __version__
from attnscale.report.axes import style
from attnscale.report.comparisons import (
    critical_points,
    rank_correlation,
    retrieving_heads,
    statistics_task,
    trades,
)
from attnscale.report.evaluation_charts import (
    HEAD_QUANTITIES,
    MAPS,
    accuracy_chart,
    bits_chart,
    criticality_chart,
    depth_grids,
    head_chart,
    head_maps,
    position_chart,
    trade_chart,
)
from attnscale.report.evaluation_data import ALL, ARGMAX, BITS, PERPLEXITY, EvaluationData, Result
from attnscale.report.page import asset
from attnscale.report.svg import swatch
from attnscale.report.verdict import verdict
from attnscale.report.words import TERMS, bits, percent, points, short

PROGRAMS = ("content.js", "scales.js", "plot.js", "heatmap.js", "evaluation.js")

Text = Callable[[float], str]


def build_evaluation_page(data: EvaluationData) -> str:
    """The whole page as text; a part that was not measured is left out."""
    sections = (_verdict, _trades, _curves, _criticality, _heads, _positions, _depths, _table, _reproduction)
    about = f"{len(data.policies)} policies, {data.lengths[0]} to {data.lengths[-1]} tokens"
    several = data.shown_model == ALL and len(data.models) > 1
    names = f"mean over {len(data.models)} models" if several else f"model {(data.models or [ALL])[0]}"
    trained = "" if data.trained_length is None else f", trained length {data.trained_length}"
    parts = {
        "title": escape(data.path.resolve().name),
        "about": escape(f"{about} · {names}{trained}"),
        "style": asset("page.css") + asset("evaluation.css"),
        "sections": "\n".join(section(data) for section in sections),
        "footer": escape(f"{data.path} · attnscale {__version__}"),
        "content": json.dumps(head_maps(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "programs": "\n".join(asset(name) for name in PROGRAMS),
    }
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], asset("evaluation.html"))


def _section(name: str, title: str, hint: str, body: str) -> str:
    hint = f'<p class="hint">{hint}</p>' if hint else ""
    heading = f'<h2 id="title-{name}">{title}</h2>'
    return f'<section id="{name}" class="full" aria-labelledby="title-{name}">{heading}{hint}{body}</section>'


def _beside(name: str, title: str, hint: str, charts: list[str], legend: str = "") -> str:
    """A section with what it says to the right of its charts, where the window is wide enough."""
    text = f'<div class="hint">{hint}{legend}</div>'
    return _section(name, title, "", f'<div class="beside"><div>{"".join(charts)}</div>{text}</div>')


def _explain(*terms: str) -> str:
    """The sentence of each term, with the term set off where the sentence names it first."""
    found = []
    for term in terms:
        text = escape(TERMS[term])
        found.append(
            re.sub(rf"(?<!\w){re.escape(term)}(?!\w)", r"<dfn>\g<0></dfn>", text, count=1, flags=re.IGNORECASE)
        )
    return " ".join(found)


def _panel(title: str, inner: str) -> str:
    return f"<figure><figcaption>{title}</figcaption>{inner}</figure>"


def _verdict(data: EvaluationData) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(data))
    terms = _explain("β", "n", "trained length", "bits per byte", "paired difference")
    body = f'<div id="sentences">{sentences}</div><p class="hint">{terms}</p>{policy_legend(data)}'
    return _section("verdict", "Verdict", "", body)


def _trades(data: EvaluationData) -> str:
    found = {task: trades(data, task) for task in data.retrieval_tasks}
    charts = [_panel(f"{task} against prose", trade_chart(data, own)) for task, own in found.items() if own]
    if not charts:
        return ""
    hint = (
        "What a law gains in retrieval against what it loses in prose, both as paired differences to constant: a point "
        "per length, joined from the shortest to the longest, where the name stands. Up and to the left is better; "
        "thin lines are 95 % intervals."
    )
    hint += " The bound argmax is left out." if ARGMAX in data.policies else ""
    return _beside("pareto", "Gain against cost", hint, charts)


def _curves(data: EvaluationData) -> str:
    panels = [_panel(f"Accuracy, {task}", accuracy_chart(data, task)) for task in data.retrieval_tasks]
    if data.whole(PERPLEXITY, "bits_per_byte"):
        panels.append(_panel("Bits per byte of prose", bits_chart(data)))
    hint, choice = "Shades are 95 % intervals.", ""
    task = statistics_task(data)
    if task is not None:
        hint = f"{hint} {_explain('w_max', 'entropy', 'Λ', 'r')}"
        heads = retrieving_heads(data, task)
        several = " The lines are medians over models, shades their range." if len(data.models) > 1 else ""
        hint += f" These four are medians over the rows of {escape(task)} that {_rows(task)}.{several} {_named(heads)}"
        choice, more = _head_panels(data, task, heads)
        panels.append(more)
    return _section("curves", "Against length", hint, f'{choice}<div class="plots three">{"".join(panels)}</div>')


def _rows(task: str) -> str:
    return "lie in the last half of the text" if task == PERPLEXITY else "predict an answer"


def _named(heads: dict[str, tuple[str, int]]) -> str:
    """Which head is followed, and why that one."""
    if not heads:
        return ""
    where = "; ".join(f"{escape(layer)} head {head} of {escape(model)}" for model, (layer, head) in heads.items())
    return (
        "The retrieving head is the one with the largest w_max under constant at the trained length, or at the length "
        f"nearest below: {where}."
    )


def _head_panels(data: EvaluationData, task: str, heads: dict[str, tuple[str, int]]) -> tuple[str, str]:
    """The choice of a head, and the charts for each choice, of which one is shown."""
    choices = ([("retrieving", "the retrieving head", heads)] if heads else []) + [
        ("all", "median over all heads", None)
    ]
    options = "".join(f'<option value="{name}">{text}</option>' for name, text, _ in choices)
    choice = f'<label for="which">w_max, entropy, Λ and r of</label> <select id="which">{options}</select>'
    parts = []
    for name, _, chosen in choices:
        panels = [_panel(title, head_chart(data, task, key, chosen)) for key, (title, _) in HEAD_QUANTITIES.items()]
        hidden = "" if name == choices[0][0] else " hidden"
        parts.append(f'<div data-which="{name}"{hidden}>{"".join(panels)}</div>')
    return f'<p class="choice">{choice}</p>', "".join(parts)


def _criticality(data: EvaluationData) -> str:
    panels = []
    for task in data.retrieval_tasks:
        found, relative = critical_points(data, task)
        if not found:
            continue
        rho = rank_correlation([(one.criticality, one.recall) for one in found])
        spearman = "" if rho is None else f"Spearman's rank correlation {rho:.2f} over {len(found)} points"
        panels.append(_panel(f"{task}: {spearman}" if spearman else task, criticality_chart(data, found, relative)))
    if not panels:
        return ""
    hint = (
        "A point per model, policy and length. If r alone decided whether a head finds its key, all points would lie "
        "on one rising curve, whatever the law and the length; the dashed line is r = 1. Spearman's rank correlation "
        "is 1 if recall always rises with r, and 0 if it does not depend on it."
    )
    return _beside("criticality", "Recall against criticality", hint, panels, policy_legend(data))


def _heads(data: EvaluationData) -> str:
    if not data.statistics:
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
    found = position_chart(data)
    if found is None:
        return ""
    hint = f"Within texts of {found[0]} tokens: how well a token is predicted, by its position."
    return _beside("positions", "Prose by position", hint, [_panel("Bits per byte of prose", found[1])])


def _depths(data: EvaluationData) -> str:
    grids = [(task, policy, svg) for task in data.retrieval_tasks for policy, svg in depth_grids(data, task).items()]
    if not grids:
        return ""
    hint = (
        "Percent answered. Down: where the answer stands, 0 the beginning of the text and 1 its end; across: the "
        "length in tokens."
    )
    many = len({task for task, _, _ in grids}) > 1
    panels = "".join(_panel(escape(f"{policy}, {task}" if many else policy), svg) for task, policy, svg in grids)
    return _section("depths", "Accuracy by depth", hint, f'<div class="plots three">{panels}</div>')


def _table(data: EvaluationData) -> str:
    hint = (
        "In brackets 95 % intervals; differences are paired, to constant, and bold where the interval leaves out zero. "
        "Seconds are for one sequence of each task and model, on the machine that ran them."
    )
    return _section("table", "All numbers", hint, results_table(data))


def _reproduction(data: EvaluationData) -> str:
    return _section("reproduce", "How to reproduce", "", reproduction(data))


def results_table(data: EvaluationData) -> str:
    """A row per length and policy; a cell without a number is empty."""
    tasks = data.retrieval_tasks
    columns: list[tuple[dict[tuple[str, int], Result], Text, Text]] = [
        (data.whole(task, "accuracy"), percent, points) for task in tasks
    ]
    heads = [name for task in tasks for name in (f"{task}, accuracy", "difference, points")]
    prose = data.whole(PERPLEXITY, BITS)
    if prose:
        columns.append((prose, bits, bits))
        heads += ["bits per byte", "difference"]
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
    return f'<div class="scroll"><table id="results">{top}<tbody>{"".join(lines)}</tbody></table></div>'


def reproduction(data: EvaluationData) -> str:
    """The command, the versions and the fingerprints that run.json has, and the files of the folder."""
    run, parts = data.run, []
    if isinstance(command := run.get("command"), str):
        parts.append(f'<p><code id="command">{escape(command)}</code></p>')
    lines = [("attnscale", str(run["attnscale"]))] if "attnscale" in run else []
    models = run.get("models")
    for name, known in models.items() if isinstance(models, Mapping) else ():
        lines.append((f"model {name}", _listed(known)))
    spec = run.get("spec")
    if isinstance(spec, Mapping):
        lines.append(("all options", _listed(spec)))
    present = sorted(path.name for path in data.path.iterdir() if path.suffix in (".csv", ".json"))
    lines.append(("files", ", ".join(present)))
    rows = "".join(f'<tr><th>{escape(name)}</th><td class="text">{escape(text)}</td></tr>' for name, text in lines)
    return "".join(parts) + f'<div class="scroll"><table>{rows}</table></div>'


def policy_legend(data: EvaluationData) -> str:
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


def _value(row: Result | None, text: Text) -> str:
    if row is None:
        return ""
    around = "" if row.low is None or row.high is None else f" ({text(row.low)} to {text(row.high)})"
    return f'{text(row.value)}<span class="quiet">{around}</span>'


def _difference(row: Result | None, text: Text) -> str:
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
