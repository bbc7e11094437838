"""The page of one or several runs: template, style, scripts and values in one self-contained file."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnscale import __version__
from attnscale.diagnostics.events import CAUSES, Thresholds
from attnscale.diagnostics.events.log import where
from attnscale.diagnostics.records.record import Event
from attnscale.diagnostics.views.display import COLOURS, MAIN, QUANTITIES, quantity_of, short_names
from attnscale.report.encoding import BUDGET, encode
from attnscale.report.run import SHOWN_INSTEAD, Key, Run
from attnscale.report.terms import LEGEND, TERMS, explanation

PROGRAMS = (
    *("content.js", "planes.js", "scales.js", "plot.js", "heatmap.js", "chart.js"),
    *("verdict.js", "maps.js", "curves.js", "app.js"),
)
SINK = 0.5  # weight on the first keys above which a head is marked as an attention sink
# Quantities with a limit: the field of `Thresholds`, and what lies beyond it.
LIMITS = {
    "w_max": ("collapsed", "collapsed above"),
    "relative_entropy": ("diffuse", "diffuse above"),
    "max_logit": ("exploding", "exploding above"),
    "score_gain": ("vanishing", "vanishing below"),
    "token_angle": ("rank", "rank collapse below"),
    "beta": ("temperature", "too small below"),
    "mismatch": ("mismatch", "mismatch above"),
}


def build_page(*runs: Run, budget: int = BUDGET) -> str:
    """Build the HTML page of a run, or the page that compares several runs.

    Args:
        runs: the runs, from `read_run`.
        budget: maximum size of the encoded values in bytes. Values are quantised, and steps thinned out, to fit it.

    Returns:
        The page as text.

    Example:
        >>> import torch
        >>> run = Run("run.jsonl", [0], [("attn", 0)], {Key("scalar", "gain", "value"): torch.ones(1, 1)})
        >>> build_page(run).splitlines()[0]
        '<!DOCTYPE html>'
    """
    names = labels([run.path for run in runs])
    described, texts = [], list[str]()
    for run, name in zip(runs, names, strict=True):
        shown, detail, planes = encode(run, budget // len(runs))
        texts += [plane.text for plane in planes]
        exact, descriptions = detail.centre == 4, [plane.description() for plane in planes]
        described.append({"label": name, "exact": exact, "planes": descriptions, **_describe(shown)})
    content = {
        "version": __version__,
        "quantities": _quantities(runs),
        "colours": COLOURS,
        "sink": SINK,
        "terms": [[term, TERMS[term]] for term in LEGEND],
        "runs": described,
    }
    return fill(
        "page.html",
        title=html.escape(" and ".join(names), quote=False),
        style=asset("page.css") + asset("run.css"),
        content=content,
        numbers="\n".join(f'<script type="text/plain" class="plane">{text}</script>' for text in texts),
        programs="\n".join(asset(name) for name in PROGRAMS),
    )


def fill(template: str, *, content: Mapping[str, Any], **parts: str) -> str:
    """Fill a template of assets/; `content` is the JSON data read by the scripts."""
    parts["content"] = json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], asset(template))


def asset(name: str) -> str:
    """Return the text of a file in assets/."""
    return files("attnscale.report").joinpath("assets", name).read_text(encoding="utf-8")


def labels(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of the paths that differ.

    >>> labels(["runs/a/attn.jsonl", "runs/b/attn.jsonl"]), labels(["runs/a.jsonl", "runs/b.jsonl"])
    (['a/attn.jsonl', 'b/attn.jsonl'], ['a.jsonl', 'b.jsonl'])
    """
    parts = [Path(path).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names


def _describe(run: Run) -> dict[str, Any]:
    step, column, quantity = run.start()
    heads = Counter(layer for layer, _ in run.columns)
    return {
        "path": run.path,
        "about": _about(run),
        "steps": run.steps,
        "reported": run.reports,
        "unreadable": run.unreadable,
        "layers": _layers(run),
        "events": [_event(run, event, heads) for event in run.events],
        "opens": {"step": step, "column": column, "quantity": quantity},
        "loss": [_plain(x) for x in run.loss],
        "lr": [_plain(x) for x in run.lr],
    }


def _about(run: Run) -> list[str]:
    """Return what the header of the file says about the run. Any field may be missing or have another type."""
    known = {name: str(value) for name, value in run.header.items() if isinstance(value, (str, int, float))}
    parts = [known.get("model", ""), f"policy {known['policy']}" if known.get("policy") else ""]
    if "every" in known:
        all_rows = ", all rows" if "rows" in run.header else ""
        rows = f", {known['rows']} rows per call" if "rows" in known else all_rows
        parts.append(f"every {known['every']} steps{rows}")
    if started := known.get("started", known.get("start", "")):
        parts.append(f"started {_date(started)}")
    versions = [f"{name} {known[name]}" for name in ("attnscale", "torch") if name in known]
    return [part for part in (*parts, ", ".join(versions)) if part]


def _date(text: str) -> str:
    """Return an ISO date without seconds; other text as it is."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return text


def _layers(run: Run) -> list[dict[str, Any]]:
    heads: dict[str, list[int]] = {}
    for layer, head in run.columns:
        heads.setdefault(layer, []).append(head)
    names = short_names(list(heads))
    return [{"name": name, "short": short, "heads": heads[name]} for name, short in zip(heads, names, strict=True)]


def _quantities(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the quantities by phase, in display order."""
    phases, names = ("forward", "backward", "scalar"), [*QUANTITIES]
    found = dict.fromkeys((phases.index(key.phase), key.name) for run in runs for key in run.planes)
    ranked = sorted(found, key=lambda one: (one[0], names.index(one[1]) if one[1] in names else len(names)))
    described = []
    for phase, quantity in [(phases[phase], quantity_of(name)) for phase, name in ranked]:
        key = Key.shown(quantity.name)
        more = {
            "phase": phase,
            "share": quantity.is_share,
            "shown": key.statistic if phase == key.phase else "mean",
            "main": MAIN.index(quantity) if quantity in MAIN and phase == key.phase else None,
            "term": explanation(quantity.name),
            "limit": _limit(quantity.name, runs),
        }
        described.append({**quantity._asdict(), **more})
    return described


def _limit(name: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the limit that is drawn in the curves of a quantity, None if it has none or the runs have several.

    Files of older versions do not name their limits: they had the defaults.
    """
    if name == "criticality":
        return {"value": 1.0, "text": "r = 1", "always": True}
    if name not in LIMITS:
        return None
    threshold, words = LIMITS[name]
    limits = [run.header.get("limits") for run in runs]
    value, *others = [(vars(Thresholds()) if own is None else own).get(threshold) for own in limits]
    if any(other != value for other in others) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return {"value": value, "text": f"{words} {value:g}", "always": False}


def _event(run: Run, event: Event, heads: Mapping[str, int]) -> dict[str, Any]:
    """Return an event for the page, with the head that shows it most clearly."""
    cause = CAUSES.get(event.cause)
    layers = list(heads)
    message = event.message.rstrip(".")
    if "since step" not in message:  # an alert of an older version, of one head
        place = where(event.places, heads) if event.places else "the whole model"
        message = f"{message} in {place}, since step {event.start}"
    return {
        "cause": event.cause,
        "title": cause.title if cause else event.cause,
        "severity": event.severity,
        "start": event.start,
        "end": event.step if event.status == "over" else None,
        "message": message,
        "advice": event.advice or (cause.advice if cause else ""),
        "places": [[layers.index(layer), of_layer] for layer, of_layer in event.places if layer in heads],
        "everywhere": not event.places,
        "quantity": SHOWN_INSTEAD.get(event.quantity, event.quantity),
        "worst": run.worst(event),
    }


def _plain(value: float | None) -> float | str | None:
    """Return a number that JSON can represent; JavaScript parses the words."""
    if value is None or math.isfinite(value):
        return value
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
