"""The table of an evaluation: length × policy with all intervals and the cost; and how to reproduce it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape

from attnscale.report.evaluation_data import BITS, PERPLEXITY, EvaluationData, Result
from attnscale.report.policy_style import style
from attnscale.report.svg import swatch
from attnscale.report.words import bits, percent, points, short

Text = Callable[[float], str]


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
