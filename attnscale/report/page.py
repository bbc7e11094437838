"""The page: template, style, programs and numbers in one self-contained file."""

from __future__ import annotations

import html
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnscale import __version__
from attnscale.diagnostics.records.record import Alert
from attnscale.diagnostics.views.display import ALERTS, COLOURS, QUANTITIES, quantity_of, short_names
from attnscale.report.data import Run
from attnscale.report.encode import BUDGET, encode, pack

PROGRAMS = ("content.js", "planes.js", "scales.js", "plot.js", "heatmap.js", "chart.js", "app.js")
MOST_GROUPS = 5000


def build_page(run: Run, budget: int = BUDGET) -> str:
    """The whole page as text."""
    shown, detail, planes = encode(run, budget)
    content = {
        "path": run.path,
        "version": __version__,
        "steps": shown.steps,
        "reported": len(run.steps),
        "layers": _layers(shown),
        "exact": detail.centre == 4,
        "statistics": detail.statistics,
        "planes": [plane.description() for plane in planes],
        "quantities": _quantities(shown),
        "colours": COLOURS,
        "kinds": shown.kinds,
        "meanings": {kind: _meaning(kind) for kind in shown.kinds},
        "alerts": [_alert(group) for group in shown.groups[:MOST_GROUPS]],
        "alertCount": sum(map(len, shown.groups)),
        "groupCount": len(shown.groups),
    }
    texts = [*(plane.text for plane in planes), pack(shown.alerting.long(), 1)]
    parts = {
        "title": html.escape(Path(run.path).name, quote=False),
        "style": asset("page.css"),
        "content": json.dumps(content, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        "numbers": "\n".join(f'<script type="text/plain" class="plane">{text}</script>' for text in texts),
        "programs": "\n".join(asset(name) for name in PROGRAMS),
    }
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], asset("page.html"))


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return files("attnscale.report").joinpath("assets", name).read_text(encoding="utf-8")


def _layers(run: Run) -> list[dict[str, Any]]:
    heads: dict[str, list[int]] = {}
    for layer, head in run.columns:
        heads.setdefault(layer, []).append(head)
    names = short_names(list(heads))
    return [{"name": name, "short": short, "heads": heads[name]} for name, short in zip(heads, names, strict=True)]


def _quantities(run: Run) -> list[dict[str, Any]]:
    """Phases in order, and in each the quantities in the order of the table."""
    phases, names = ("forward", "backward", "scalar"), [*QUANTITIES]
    found = dict.fromkeys((phases.index(key.phase), key.name) for key in run.planes)
    ranked = sorted(found, key=lambda one: (one[0], names.index(one[1]) if one[1] in names else len(names)))
    shown = [(phases[phase], quantity_of(name)) for phase, name in ranked]
    return [{**quantity._asdict(), "phase": phase, "share": quantity.is_share} for phase, quantity in shown]


def _meaning(kind: str) -> dict[str, str]:
    """What an alert says, and the quantity that shows it."""
    if kind not in ALERTS:
        return {"explanation": "", "quantity": ""}
    quantity = QUANTITIES[ALERTS[kind].quantities[0]]
    return {"explanation": ALERTS[kind].explanation, "quantity": f"{quantity.phase or 'scalar'}.{quantity.name}"}


def _alert(group: list[Alert]) -> dict[str, Any]:
    latest = group[-1]
    return {
        "kind": latest.kind,
        "layer": latest.layer,
        "head": latest.head,
        "count": len(group),
        "first": group[0].step,
        "last": latest.step,
        "value": _plain(latest.value),
        "limit": _plain(latest.limit),
        "message": latest.message,
    }


def _plain(value: float) -> float | str:
    """A number as JSON can hold it; JavaScript reads the words."""
    return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
