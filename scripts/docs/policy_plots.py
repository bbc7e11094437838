"""The page section on every policy: its docstring, its YAML file, β at a few lengths, and a plot of β(n).

A policy is drawn with the parameters of `configs/policy/NAME.yaml`. Policies that read scores or queries have no β(n)
of their own and are drawn on stated examples.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import attnscale
from attnscale.policies import POLICIES
from attnscale.policies.base import QueryPolicy, ScorePolicy
from attnscale.policies.laws import LengthLaw
from attnscale.statistics import row_statistics
from scripts.docs.sources import ROOT

LENGTHS = torch.unique(torch.logspace(0, 20, 241, base=2).long())
SHOWN = (128, 2048, 8192, 65536, 2**20)
SCORE_LENGTHS = [2**power for power in range(1, 15)]
SCORE_ROWS = 64

# The quantity that the lines of a query policy differ in, the parameter that sets it, and the parameter's value where
# the quantity is 1, for queries of ones. Everything else has its initial value.
GELU_OF_ONE = float(torch.nn.functional.gelu(torch.ones(())))
BY_QUERY = {
    "asentmax": ("w_γ·x", "w_gamma", 1 / 64),
    "selective": ("w·gelu(x)", "w", 1 / 64 / GELU_OF_ONE),
    "moondream": ("α", "alpha", 1.0),
    "qassmax": ("gate(x)", "gate_out_bias", 1.0),
}

# Grey and colours that are readable on a white and on a dark page.
INK = "#808790"
COLOURS = ("#3d85e0", "#e0792d", "#1f9e77")


class Curve(NamedTuple):
    """One line of a plot: n, β, and the 10 % and 90 % quantiles over rows where β is random."""

    label: str
    n: Tensor
    beta: Tensor
    band: tuple[Tensor, Tensor] | None = None


def build(name: str) -> Any:
    """The policy of `configs/policy/NAME.yaml`."""
    return attnscale.build_policy(ROOT / f"configs/policy/{name}.yaml")


def curves_of(name: str) -> list[Curve]:
    """The lines of the plot of a policy.

    >>> [curve.label for curve in curves_of("log")]
    ['γ·f(n)', 'f(n)/f(L)', 'max(1, f(n)/f(L))']
    """
    policy = build(name)
    if isinstance(policy, ScorePolicy):
        return [_on_gaussian_scores(policy)]
    if isinstance(policy, QueryPolicy):
        return list(_by_query(policy))
    if isinstance(policy, LengthLaw):
        given = {key: value for key, value in policy.to_dict().items() if key not in ("reference_length", "floor")}
        forms = {"γ·f(n)": {}, "f(n)/f(L)": {"reference_length": 2048}}
        forms["max(1, f(n)/f(L))"] = {"reference_length": 2048, "floor": True}
        return [Curve(label, LENGTHS, attnscale.build_policy(given, **form)(LENGTHS)) for label, form in forms.items()]
    with torch.no_grad():
        beta = policy(LENGTHS[None]) if hasattr(policy, "num_heads") else policy(LENGTHS)
    rows = torch.unique_consecutive(beta.reshape(-1, LENGTHS.numel()), dim=0)  # heads with the same β are one line
    labels = [""] if len(rows) == 1 else ["heads 0-1", "the other heads"]
    return [Curve(label, LENGTHS, row) for label, row in zip(labels, rows, strict=True)]


def _on_gaussian_scores(policy: ScorePolicy) -> Curve:
    """β of independent N(0, 1) scores: the median over rows, and quantiles."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in SCORE_LENGTHS:
        scores = torch.randn(1, 1, SCORE_ROWS, n, generator=generator)
        found.append(policy.from_stats(row_statistics(scores, 1.0, request=policy.request)).flatten())
    low, middle, high = torch.stack(found).quantile(torch.tensor([0.1, 0.5, 0.9]), dim=-1)
    return Curve("median of 64 rows, 10–90 % shaded", torch.tensor(SCORE_LENGTHS), middle, (low, high))


@torch.no_grad()
def _by_query(policy: QueryPolicy) -> Iterator[Curve]:
    """β for three values of a quantity that the policy computes from the query or learns."""
    label, parameter, unit = BY_QUERY[policy.name]
    query = torch.ones(1, policy.num_heads, LENGTHS.numel(), policy.head_dim)
    for value in (0.0, 0.25, 0.5):
        getattr(policy, parameter).fill_(value * unit)
        yield Curve(f"{label} = {value:g}", LENGTHS, policy(LENGTHS, query=query)[0, 0])


def draw(curves: list[Curve]) -> str:
    """A plot of β against n as SVG with a transparent background; the same curves give the same bytes."""
    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    axes = figure.subplots()
    for place, curve in enumerate(curves):
        axes.plot(curve.n, curve.beta.detach(), color=COLOURS[place], linewidth=1.8, label=curve.label)
        if curve.band is not None:
            axes.fill_between(curve.n, *curve.band, color=COLOURS[place], alpha=0.25, linewidth=0)
    values = torch.cat([values.detach() for curve in curves for values in (curve.beta, *(curve.band or ()))])
    axes.set_xscale("log", base=2)
    if values.max() > 8 * values.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif values.max() - values.min() < 1e-3:
        axes.set_ylim(0, 1.25 * float(values.max()))
    axes.set_xlabel("visible keys n", color=INK)
    axes.set_ylabel("β", color=INK, rotation=0, labelpad=10)
    axes.tick_params(which="both", colors=INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    if any(curve.label for curve in curves):
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),  # above the plot
            ncols=3,
            borderaxespad=0.2,
            frameon=False,
            labelcolor=INK,
            fontsize=9,
        )
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "attnscale", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def beta_at(name: str, n: int) -> str:
    """β at n keys for the overview; empty where it depends on more than n."""
    policy = build(name)
    if isinstance(policy, (ScorePolicy, QueryPolicy)):
        return "–"
    with torch.no_grad():
        beta = policy(torch.tensor([n]))
    low, high = float(beta.min()), float(beta.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} and {high:.4g}"


def section() -> tuple[str, dict[str, str]]:
    """Markdown, and the pictures it shows: path in the site → SVG."""
    lines = [f"| policy, as in its file | {' | '.join(f'n = {n}' for n in SHOWN)} |", "|---" * 6 + "|"]
    lines += [f"| [`{name}`](#{name}) | {' | '.join(beta_at(name, n) for n in SHOWN)} |" for name in POLICIES]
    pictures = {}
    for name, kind in POLICIES.items():
        picture = f"assets/policies/{name}.svg"
        pictures[picture] = draw(curves_of(name))
        fields = {key: value for key, value in build(name).to_dict().items() if key != "name"}
        given = "".join(f", {key}={value!r}" for key, value in fields.items() if value is not None)
        lines += ["", f"### {name}", "", *_prose(kind), "", "```python", f'build_policy("{name}"{given})', "```", ""]
        lines += [f"![β(n) of {name}]({picture}){{ .beta }}", *_caption(kind)]
    return "\n".join(lines), pictures


def _prose(kind: type) -> list[str]:
    """The docstring up to its first section or example."""
    return re.split(r"^(?:\w+:$|>>>)", inspect.cleandoc(kind.__doc__ or ""), flags=re.MULTILINE)[0].splitlines()


def _caption(kind: type) -> list[str]:
    if issubclass(kind, ScorePolicy):
        text = "β depends on the scores of the row. Example: independent N(0, 1) scores, 64 rows for each n, seed 0."
    elif issubclass(kind, QueryPolicy):
        text = f"β depends on the query x. Examples: three values of {BY_QUERY[kind.name][0]}; 0 is the initial value."
    elif issubclass(kind, LengthLaw):
        text = "The three forms of the law, with L = 2048."
    else:
        return []
    return ["", f"*{text}*"]
