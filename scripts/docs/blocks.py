"""Parts of pages that come from the code: a line `<!-- generated: NAME -->` in a page is replaced by one of them.

Text between this line and `<!-- end: NAME -->` is for readers on GitHub and is replaced too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attnscale.diagnostics.events import CAUSES
from attnscale.policies import POLICIES
from scripts.docs import model_types, policy_plots

_MARK = re.compile(r"^<!-- generated: (\w+) -->$(?:(?:\n(?!<!--).*)*\n<!-- end: \1 -->$)?", re.MULTILINE)

Files = dict[str, str]


def events() -> tuple[str, Files]:
    """The causes of events: how each is recognised, and what to try."""
    lines = ["| cause | event | recognised by | what to try |", "|---" * 4 + "|"]
    for name, cause in CAUSES.items():
        summary = (cause.rule.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        lines.append(f"| `{name}` | {cause.title} | {summary} | {cause.advice} |")
    return "\n".join(lines), {}


def policy_classes() -> tuple[str, Files]:
    """Directives for the API reference of every registered policy."""
    return "\n\n".join(f"::: {kind.__module__}.{kind.__qualname__}" for kind in POLICIES.values()), {}


BLOCKS: dict[str, Callable[[], tuple[str, Files]]] = {
    "events": events,
    "policy_classes": policy_classes,
    "policies": policy_plots.section,
    "model_types": model_types.section,
}


def names_in(markdown: str) -> list[str]:
    """The blocks that a page has.

    >>> names_in("before\\n\\n<!-- generated: events -->\\n")
    ['events']
    """
    return _MARK.findall(markdown)


def fill(markdown: str, made: dict[str, str]) -> str:
    """A page with its blocks."""
    return _MARK.sub(lambda mark: made[mark[1]], markdown)
