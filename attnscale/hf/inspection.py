"""Table of the attention layers of a transformers model, with the effect of `apply` on each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from attnscale._util.checks import read_int
from attnscale._util.ranges import write_range
from attnscale.errors import ArgumentError, reject
from attnscale.hf import selection
from attnscale.hf.advice import HEADLINES
from attnscale.hf.attach import described_policies
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, transformers_model
from attnscale.hf.config_record import is_pending, record_of
from attnscale.hf.context import find_trained_length, position_table, positions_of
from attnscale.hf.existing import Existing, find_existing
from attnscale.hf.plan import Plan, beta_at_end, build_policies, read_plan
from attnscale.hf.recommendation import recommend
from attnscale.hf.selection import Layers, OnExisting, Towers
from attnscale.hf.sites import MonitoredSite, is_called, site_of
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.record import NAME, split_number

LENGTHS = (1024, 8192, 65536)
BEYOND = 4  # the table is headed by the advice of `recommend` at this multiple of the trained length

Verdict = Literal["selected", "left alone", "refused", "free"]

_TITLES = ("layer", "path", "part", "routed", "heads", "rope", "window", "sinks", "softcap", "own scaling", "apply")


@dataclass(frozen=True, eq=False)
class LayerInspection:
    """One attention layer in an `Inspection`.

    Attributes:
        facts: path, number, heads, window and so on.
        existing: descriptions of built-in length scaling.
        verdict: "selected", "left alone", "refused", or "free" if no policy was passed.
        detail: β for "selected", otherwise the reason.
    """

    facts: AttentionLayer
    existing: tuple[str, ...]
    verdict: Verdict
    detail: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, without layer and path."""
        facts = self.facts
        return (
            "cross" if facts.cross else "text" if facts.text else "other",
            "yes" if facts.routed else "no",
            f"{facts.num_heads or '?'} × {facts.head_dim or '?'}",
            "RoPE" if facts.rope else "NoPE",
            "–" if facts.window is None else str(facts.window),
            "yes" if facts.sinks else "–",
            "–" if facts.softcap is None else f"{facts.softcap:g}",
            "; ".join(self.existing) or "–",
            self.detail if self.verdict == "free" else f"{self.verdict}: {self.detail}",
        )


@dataclass(frozen=True, eq=False)
class Inspection:
    """The result of `inspect`; `str()` gives a table with one line per run of identical layers.

    Attributes:
        model: class name of the model.
        policy: the policy as text, or None.
        lengths: text lengths at which β is shown.
        layers: one `LayerInspection` per attention layer.
        cautions: the warnings that `apply` would issue.
        context: the trained length, the positions, and what `recommend` advises at four times this length.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
        >>> inspection = attnscale.hf.inspect(model, "ssmax")
        >>> inspection.accepted, len(inspection.layers)
        (True, 2)
    """

    model: str
    policy: str | None
    lengths: tuple[int, ...]
    layers: tuple[LayerInspection, ...]
    cautions: tuple[str, ...] = ()
    context: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether `apply` would succeed: at least one layer is selected and none is refused."""
        verdicts = {layer.verdict for layer in self.layers}
        return bool(verdicts & {"selected", "free"}) and "refused" not in verdicts

    def __str__(self) -> str:
        lines = [_TITLES, *_lines(self.layers)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        cautions = ["", *self.cautions] if self.cautions else []
        return "\n".join([self._headline(), *self.context, "", *table, *cautions])

    def _headline(self) -> str:
        parts = [f"{self.model}: {len(self.layers)} attention module{'' if len(self.layers) == 1 else 's'}"]
        if self.policy is not None:
            parts.append(self.policy if self.accepted else f"{self.policy} would be refused")
        if any("β = " in layer.detail for layer in self.layers):
            parts.append(f"β at n = {', '.join(map(str, self.lengths))}")
        return "; ".join(parts)


def inspect(
    model: nn.Module,
    policy: PolicySpec | Plan | None = None,
    *,
    layers: Layers = "all",
    cross: bool = False,
    towers: Towers = "text",
    on_existing: OnExisting = "raise",
    override: bool = False,
    probe: object = True,
    lengths: Sequence[int] = LENGTHS,
    **parameters: Any,
) -> Inspection:
    """List every attention layer of a transformers model and the effect of `apply`, without changing or running it.

    Args:
        model: a transformers model or a wrapper of one.
        policy: the policy or plan to check, as in `apply`. With None only the layers are listed.
        layers, cross, towers, on_existing: as in `apply`.
        override, probe: accepted for symmetry with `apply`; they have no effect.
        lengths: text lengths at which β of the last row is shown. A sliding window limits n.
        **parameters: parameters of the policy.

    Returns:
        An `Inspection`. Print it for a table; the warnings of `apply` follow the table.

    Raises:
        ArgumentError: an argument is invalid. A refused layer does not raise; its verdict is "refused".
        ArgumentTypeError: `model` is not a transformers model, or `policy` is a model.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
        >>> found = attnscale.hf.inspect(model, "log", reference_length=1024, floor=True, layers=[1])
        >>> [(layer.verdict, layer.detail) for layer in found.layers]
        [('left alone', 'not in layers=[1]'), ('selected', 'β = 1, 1.3, 1.6')]
    """
    selection.check_on_existing(on_existing)
    lengths = tuple(read_int("lengths", n, "at least one int >= 1", least=1) for n in lengths)
    if not lengths:
        reject("lengths", lengths, "at least one int >= 1")
    selection.refuse_model_as_policy(model, policy)
    found = find_attention_layers(model)
    plan = None if policy is None else read_plan(policy, **parameters)
    if plan is None and parameters:
        reject("policy", None, f"a policy together with the parameters {sorted(parameters)}")
    try:
        chosen = {layer.path for layer in selection.select(model, layers=layers, cross=cross, towers=towers)}
    except ArgumentError:
        if str(layers) != "all" or towers not in ("text", "all"):
            raise
        chosen = set()  # a model without attention, or without text attention
    if plan is not None and chosen:
        plan.check(max(layer.layer for layer in found if layer.path in chosen) + 1)
    pending = described_policies(model) if is_pending(model) and record_of(model) is not None else {}
    judged = []
    for layer in found:
        existing = find_existing(model, layer)
        if layer.path in chosen:
            verdict, detail = _judge(layer, found, existing, plan, on_existing, lengths, pending.get(layer.path))
        else:
            verdict, detail = "left alone", _why_not(layer, layers, cross, towers)
        judged.append(LayerInspection(layer, tuple(one.description for one in existing), verdict, detail))
    selected = [layer.facts for layer in judged if layer.verdict == "selected"]
    policies = {} if plan is None else build_policies(plan, selected)
    cautions = tuple(selection.find_cautions(model, selected, policies))
    kind = type(transformers_model(model)).__name__
    return Inspection(kind, _named(plan), tuple(lengths), tuple(judged), cautions, _context(model, found))


def _context(model: nn.Module, layers: Sequence[AttentionLayer]) -> tuple[str, ...]:
    """Return the lines between headline and table."""
    trained, table = find_trained_length(transformers_model(model).config), position_table(model)
    length = "unknown" if trained is None else f"{trained.tokens} tokens ({trained.source})"
    own = [positions_of(layer, model, table) for layer in layers if layer.text and not layer.cross]
    lines = [f"trained length: {length}; positions: {', '.join(dict.fromkeys(own)) or 'none'}"]
    if trained is not None:
        advised = recommend(model, BEYOND * trained.tokens)
        headline = f"at {advised.length} tokens: {HEADLINES[advised.verdict]}"
        lines.append(headline if advised.line is None else f"{headline}; {advised.line}")
    return tuple(lines)


def _named(plan: Plan | None) -> str | None:
    if plan is None:
        return None
    plain = plan.to_dict()
    if "name" not in plain:
        return str(plain)
    return f"{plain['name']}({', '.join(f'{key}={value!r}' for key, value in plain.items() if key != 'name')})"


def _why_not(layer: AttentionLayer, layers: Layers, cross: bool, towers: str) -> str:
    if layer.cross and not cross:
        return "cross-attention (cross=True selects it)"
    if not layer.text and towers == "text":
        return "not text (towers='all' selects it)"
    return f"not in layers={layers!r}"


def _judge(
    layer: AttentionLayer,
    every: Sequence[AttentionLayer],
    existing: Sequence[Existing],
    plan: Plan | None,
    on_existing: OnExisting,
    lengths: Sequence[int],
    pending: Policy | None,
) -> tuple[Verdict, str]:
    """Return verdict and detail of a selected layer; `pending` is the policy it gets in the first forward pass."""
    unsupported = selection.why_unsupported(layer, every)
    if unsupported is not None:
        return "refused", unsupported
    site = site_of(layer.module)
    if isinstance(site, MonitoredSite):
        advice = "; close it, and attach a new one after apply"
        return "free" if plan is None else "refused", f"a Monitor is attached{'' if plan is None else advice}"
    policy = pending if site is None else site.policy
    if policy is not None:
        has = f"has {_betas(policy, layer, lengths)}"
        if site is not None and not is_called(site, layer.module):
            name = layer.config._attn_implementation
            has += f", but does not use it: attn_implementation={name!r}, not {NAME!r}"
        return ("free", has) if plan is None else ("refused", f"already {has}; call handle.remove() first")
    if plan is None:
        return "free", "supported"
    if any(site_of(other.module) is not None for other in every):
        reason = "other layers have a policy from an earlier apply"
        return "refused", f"{reason}; call handle.remove() and pass one plan"
    if existing and on_existing == "raise":
        return "refused", "already scaled; on_existing='compose' multiplies on top, 'replace' disables it"
    fixed = [one.fixed for one in existing if one.fixed is not None]
    if fixed and on_existing == "replace":
        return "refused", f"already scaled; {fixed[0]}"
    try:
        policy = build_policies(plan, [layer])[layer.path]
    except ArgumentError as error:
        return "refused", str(error)
    then = {"compose": ", on top of its own scaling", "replace": ", instead of its own scaling"}
    return "selected", f"{_betas(policy, layer, lengths)}{then[on_existing] if existing else ''}"


def _betas(policy: Policy, layer: AttentionLayer, lengths: Sequence[int]) -> str:
    """Format β at each length, as a range if the heads differ."""
    if getattr(policy, "needs_scores", False):
        return "β computed from scores"
    if policy.needs_query:
        return "β computed from queries"
    beta = beta_at_end(policy, layer, lengths)
    ranges = zip(beta.amin(0).tolist(), beta.amax(0).tolist(), strict=True)
    return f"β = {', '.join(f'{low:.4g}' if low == high else f'{low:.4g}…{high:.4g}' for low, high in ranges)}"


def _lines(layers: Sequence[LayerInspection]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table as cells; adjacent identical layers of a stack share a row."""
    stacks: dict[str, list[LayerInspection]] = {}
    for layer in layers:
        stacks.setdefault(split_number(layer.facts.path)[0], []).append(layer)
    for pattern, stack in stacks.items():
        for cells, neighbours in itertools.groupby(stack, key=lambda layer: layer.cells):
            run = [layer.facts for layer in neighbours]
            yield write_range([facts.layer for facts in run]), pattern if len(run) > 1 else run[0].path, *cells
