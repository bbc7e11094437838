"""Parts of pages that come from the code: a line `<!-- generated: NAME -->` in a page is replaced by one of them.

Text between this line and `<!-- end: NAME -->` is for readers on GitHub and is replaced too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields

from attnscale.diagnostics import Thresholds
from attnscale.diagnostics.alerts import ALERTS
from attnscale.policies import POLICIES
from scripts.docs import model_types, policy_plots

_MARK = re.compile(r"^<!-- generated: (\w+) -->$(?:(?:\n(?!<!--).*)*\n<!-- end: \1 -->$)?", re.MULTILINE)

Files = dict[str, str]


def alerts() -> tuple[str, Files]:
    """The alerts, their default limits and their conditions, from `Thresholds`."""
    defaults = {field.name: field.default for field in fields(Thresholds)}
    lines = ["| alert | meaning | raised if | default limit | only if | not before step |", "|---" * 6 + "|"]
    for kind, about in ALERTS.items():
        name, statistic, direction = about.compared
        statistic = {"p50": "median", "max": "maximum"}.get(statistic, statistic)
        limit = "any row" if defaults[kind] is True else f"{defaults[kind]:g}"
        condition = "present" if defaults[kind] is True else f"{direction} the limit"
        where = ", ".join(f"median of `{other}` > {least:g}" for other, least in about.where) or "–"
        after = str(defaults["after_step"]) if about.after_start else "–"
        lines.append(
            f"| `{kind}` | {about.explanation} | {statistic} of `{name}` {condition} | {limit} | {where} | {after} |"
        )
    return "\n".join(lines), {}


def policy_classes() -> tuple[str, Files]:
    """Directives for the API reference of every registered policy."""
    return "\n\n".join(f"::: {kind.__module__}.{kind.__qualname__}" for kind in POLICIES.values()), {}


BLOCKS: dict[str, Callable[[], tuple[str, Files]]] = {
    "alerts": alerts,
    "policy_classes": policy_classes,
    "policies": policy_plots.section,
    "model_types": model_types.section,
}


def names_in(markdown: str) -> list[str]:
    """The blocks that a page has.

    >>> names_in("before\\n\\n<!-- generated: alerts -->\\n")
    ['alerts']
    """
    return _MARK.findall(markdown)


def fill(markdown: str, made: dict[str, str]) -> str:
    """A page with its blocks."""
    return _MARK.sub(lambda mark: made[mark[1]], markdown)
