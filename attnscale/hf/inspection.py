"""A table of the attention layers of a transformers model, and what `apply` would do with each of them."""

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
from attnscale.hf.attach import described_policies
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, transformers_model
from attnscale.hf.config_record import is_pending, record_of
from attnscale.hf.existing import find_existing
from attnscale.hf.plan import Plan, beta_at_end, build_policies, read_plan
from attnscale.hf.selection import Layers, OnExisting, Towers
from attnscale.hf.sites import MonitoredSite, is_called, site_of
from attnscale.policies import Policy, PolicySpec
from attnscale.policies.record import NAME, split_number

LENGTHS = (1024, 8192, 65536)

Verdict = Literal["selected", "left alone", "refused", "free"]

_TITLES = ("layer", "path", "part", "routed", "heads", "rope", "window", "sinks", "softcap", "scaled already", "apply")


@dataclass(frozen=True, eq=False)
class LayerInspection:
    """One attention layer: facts, scaling of the model's own, and what `apply` would do.

    `detail` gives β where the verdict is "selected", the reason where it is "left alone" or "refused". The verdict is
    "free" where no policy was named.
    """

    facts: AttentionLayer
    existing: tuple[str, ...]
    verdict: Verdict
    detail: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line in the table, after layer and path."""
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
    """What `inspect` found; as a string, a table with a line per run of equal layers."""

    model: str
    policy: str | None
    lengths: tuple[int, ...]
    layers: tuple[LayerInspection, ...]
    cautions: tuple[str, ...] = ()  # what `apply` would warn of

    @property
    def accepted(self) -> bool:
        """Whether `apply` would go through: something is selected, and nothing refused."""
        verdicts = {layer.verdict for layer in self.layers}
        return bool(verdicts & {"selected", "free"}) and "refused" not in verdicts

    def __str__(self) -> str:
        lines = [_TITLES, *_lines(self.layers)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([self._headline(), "", *table, *([""] if self.cautions else []), *self.cautions])

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
    """Show every attention of a transformers model and what `apply` would do with it; nothing is changed or run.

        print(attnscale.hf.inspect(model, "log", reference_length=8192, floor=True))

    The keywords are those of `apply`; `override` and `probe` make no difference. β is shown for rows at the end of
    texts of these `lengths`, of which a window hides a part. The warnings of `apply` stand at the end.
    """
    selection.check_on_existing(on_existing)
    lengths = tuple(read_int("lengths", n, "at least one int >= 1", least=1) for n in lengths)
    if not lengths:
        reject("lengths", lengths, "at least one int >= 1")
    selection.refuse_model_as_policy(model, policy)
    found = find_attention_layers(model)
    plan = None if policy is None else read_plan(policy, **parameters)
    if plan is None and parameters:
        reject("policy", None, f"a policy, since it is given {sorted(parameters)}")
    try:
        chosen = {layer.path for layer in selection.select(model, layers=layers, cross=cross, towers=towers)}
    except ArgumentError:
        if str(layers) != "all" or towers not in ("text", "all"):
            raise
        chosen = set()  # a model without attention, or with none that reads text
    if plan is not None and chosen:
        plan.check(max(layer.layer for layer in found if layer.path in chosen) + 1)
    pending = described_policies(model) if is_pending(model) and record_of(model) is not None else {}
    judged = []
    for layer in found:
        existing = tuple(one.description for one in find_existing(model, layer))
        if layer.path in chosen:
            verdict, detail = _judge(layer, found, existing, plan, on_existing, lengths, pending.get(layer.path))
        else:
            verdict, detail = "left alone", _why_not(layer, layers, cross, towers)
        judged.append(LayerInspection(layer, existing, verdict, detail))
    selected = [layer.facts for layer in judged if layer.verdict == "selected"]
    policies = {} if plan is None else build_policies(plan, selected)
    cautions = tuple(selection.find_cautions(model, selected, policies))
    kind = type(transformers_model(model)).__name__
    return Inspection(kind, _named(plan), tuple(lengths), tuple(judged), cautions)


def _named(plan: Plan | None) -> str | None:
    if plan is None:
        return None
    plain = plan.to_dict()
    if "name" not in plain:
        return str(plain)
    return f"{plain['name']}({', '.join(f'{key}={value!r}' for key, value in plain.items() if key != 'name')})"


def _why_not(layer: AttentionLayer, layers: Layers, cross: bool, towers: str) -> str:
    if layer.cross and not cross:
        return "cross attention (cross=True selects it)"
    if not layer.text and towers == "text":
        return "reads no text (towers='all' selects it)"
    return f"not in layers={layers!r}"


def _judge(
    layer: AttentionLayer,
    every: Sequence[AttentionLayer],
    existing: tuple[str, ...],
    plan: Plan | None,
    on_existing: OnExisting,
    lengths: Sequence[int],
    pending: Policy | None,
) -> tuple[Verdict, str]:
    """The verdict on a layer that the keywords select; `pending` is the policy it will get at its first forward."""
    unsupported = selection.why_unsupported(layer, every)
    if unsupported is not None:
        return "refused", unsupported
    site = site_of(layer.module)
    if isinstance(site, MonitoredSite):
        advice = "; close it, and attach a new one afterwards"
        return "free" if plan is None else "refused", f"a Monitor listens to it{'' if plan is None else advice}"
    policy = pending if site is None else site.policy
    if policy is not None:
        has = f"has {_betas(policy, layer, lengths)}"
        if site is not None and not is_called(site, layer.module):
            name = layer.config._attn_implementation
            has += f", but is not asked for it: attn_implementation={name!r}, not {NAME!r}"
        return ("free", has) if plan is None else ("refused", f"{has} already; handle.remove() first")
    if plan is None:
        return "free", "takes a policy"
    if any(site_of(other.module) is not None for other in every):
        reason = "other layers have a policy from another apply"
        return "refused", f"{reason}; handle.remove() first, and use a plan for both"
    if existing and on_existing == "raise":
        return "refused", "scaled already; on_existing='compose' scales on top of it, 'replace' switches it off"
    try:
        policy = build_policies(plan, [layer])[layer.path]
    except ArgumentError as error:
        return "refused", str(error)
    then = {"compose": ", on top of its own", "replace": ", in place of its own"}[on_existing] if existing else ""
    return "selected", f"{_betas(policy, layer, lengths)}{then}"


def _betas(policy: Policy, layer: AttentionLayer, lengths: Sequence[int]) -> str:
    """β at each length; a range where heads differ."""
    if getattr(policy, "needs_scores", False):
        return "β from its scores"
    if policy.needs_query:
        return "β from its queries"
    beta = beta_at_end(policy, layer, lengths)
    ranges = zip(beta.amin(0).tolist(), beta.amax(0).tolist(), strict=True)
    return f"β = {', '.join(f'{low:.4g}' if low == high else f'{low:.4g}…{high:.4g}' for low, high in ranges)}"


def _lines(layers: Sequence[LayerInspection]) -> Iterator[tuple[str, ...]]:
    """Lines of the table, as cells: neighbours in a stack that are alike share a line."""
    stacks: dict[str, list[LayerInspection]] = {}
    for layer in layers:
        stacks.setdefault(split_number(layer.facts.path)[0], []).append(layer)
    for pattern, stack in stacks.items():
        for cells, neighbours in itertools.groupby(stack, key=lambda layer: layer.cells):
            run = [layer.facts for layer in neighbours]
            yield write_range([facts.layer for facts in run]), pattern if len(run) > 1 else run[0].path, *cells
