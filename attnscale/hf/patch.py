"""Give the attention of a transformers model a temperature policy, in place and reversibly."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError, AttnScaleWarning, reject, reject_type
from attnscale.hf.advice import OWN_ATTENTION, check_order, few, instead, instead_of_sparse, without_attention
from attnscale.hf.cautions import find_cautions
from attnscale.hf.existing import Existing, find_existing
from attnscale.hf.handle import Handle
from attnscale.hf.install import check_shape, install
from attnscale.hf.listening import is_listened_to
from attnscale.hf.plan import Plan, read_plan
from attnscale.hf.probe import Inputs
from attnscale.hf.probe import probe as run_probe
from attnscale.hf.sites import has_site, is_learned
from attnscale.hf.survey import AttentionLayer, survey, transformers_model
from attnscale.policies import FormulaPolicy, Policy, PolicySpec

Layers = Literal["all", "full", "nope"] | str | int | Sequence[int]
OnExisting = Literal["raise", "compose", "replace"]


def apply(
    model: nn.Module,
    policy: PolicySpec | Plan,
    *,
    layers: Layers = "all",
    cross: bool = False,
    towers: Literal["text", "all"] = "text",
    on_existing: OnExisting = "raise",
    override: bool = False,
    probe: bool | Inputs = True,
    **parameters: Any,
) -> Handle:
    """Let the attention of a transformers model scale its logits by β(n), from now on and until `handle.remove()`.

    Build the optimizer afterwards: what a policy learns belongs to the attention modules. Nothing is left behind where
    this raises. An `AttnScaleWarning` tells of policies that a pretrained model is unlikely to bear.

    Args:
        model: any model, or wrapper of one (PEFT, DDP), whose attention goes through transformers' interface.
        policy: whatever `build_policy` takes, with its keywords; or a mapping or YAML file with `default`, `layers`
            ({"4-11": policy}) and `heads` ({"0-3": policy}). Of a finished policy each module gets a copy, with what
            it has learned.
        layers: "all"; "full", those without a sliding window; "nope", those without rotary embedding; a range such as
            "4-11"; a number, or several.
        cross: also cross attention, whose n is the number of encoder states that a row sees.
        towers: "text", or "all" for vision and speech encoders too.
        on_existing: what to do where the model scales its logits by length already: "raise", "compose" (β comes on
            top) or "replace" (its own scaling is switched off).
        override: keep the name "sdpa", which continuous batching and context parallelism insist on, and answer to it.
        probe: prove with a forward of four tokens that every module asks us; pass the model's inputs where they are
            not tokens, or False to go without.
    """
    check_order(model, policy)
    plan = read_plan(policy, **parameters)
    chosen = select(model, layers=layers, cross=cross, towers=towers)
    _refuse(model, chosen)
    refuse_existing(model, chosen, on_existing)
    plan.check(max(layer.layer for layer in chosen) + 1)
    policies = build_policies(chosen, plan)
    cautions = find_cautions(model, chosen, policies)  # while the config does not name attnscale yet
    handle = install(model, policies, on_existing=on_existing, override=override)
    try:
        if probe is not False:
            _prove(model, chosen, None if probe is True else probe)
        for caution in cautions:
            warnings.warn(caution, AttnScaleWarning, stacklevel=2)
    except BaseException:
        handle.remove()
        raise
    return handle


def select(
    model: nn.Module, *, layers: Layers = "all", cross: bool = False, towers: Literal["text", "all"] = "text"
) -> list[AttentionLayer]:
    """The attention modules that `apply` would give a policy."""
    if towers not in ("text", "all"):
        reject("towers", towers, "'text' or 'all'")
    found = survey(model)
    if not found:
        raise ArgumentError(without_attention(model))
    every = [layer for layer in found if (cross or not layer.cross) and (towers == "all" or layer.text)]
    if layers == "all":
        chosen = every
    elif layers == "full":
        chosen = [layer for layer in every if layer.window is None]
    elif layers == "nope":
        chosen = [layer for layer in every if layer.rope is False]
    else:
        numbers = _numbers(layers)
        present = {layer.layer for layer in every}
        if present and any(number not in present for number in numbers):
            reject("layers", layers, f"'all', 'full', 'nope' or layers of this model, {write_range(sorted(present))}")
        chosen = [layer for layer in every if layer.layer in numbers]
    if not chosen:
        raise ArgumentError(
            f"layers={layers!r}, cross={cross}, towers={towers!r} are not accepted: together they select no attention "
            f"of {type(transformers_model(model)).__name__}; attnscale.hf.inspect(model) shows what it has"
        )
    return chosen


def _numbers(layers: str | int | Sequence[int]) -> list[int]:
    """The layers that a number, several, or a range such as "4-11" names."""
    if isinstance(layers, str):
        return read_range("layers", layers)
    given = list(layers) if isinstance(layers, Iterable) else [layers]
    if not given or any(isinstance(number, bool) or not isinstance(number, int) for number in given):
        reject_type("layers", layers, "'all', 'full', 'nope', a number, several, or a range such as '4-11'")
    return given


def _refuse(model: nn.Module, chosen: list[AttentionLayer]) -> None:
    """Refuse what cannot be swapped, with what to do instead."""
    kind = type(transformers_model(model)).__name__
    every = survey(model)
    unrouted = [layer for layer in chosen if not layer.routed]
    if unrouted:
        raise ArgumentError(
            f"model={kind} is not accepted: {_paths(unrouted)} {OWN_ATTENTION}; "
            f"{instead([layer for layer in every if not layer.routed], every)}"
        )
    sparse = [layer for layer in chosen if layer.sparse]
    if sparse:
        raise ArgumentError(
            f"model={kind} is not accepted: {_paths(sparse)} attends to keys that an indexer picks, and would silently "
            f"attend to all of them; {instead_of_sparse([layer for layer in every if layer.sparse], every)}"
        )
    applied = [layer for layer in every if has_site(layer.module)]
    if any(is_listened_to(layer.module) for layer in applied):
        raise ArgumentError(
            f"model={kind} is not accepted: a Monitor listens to it; close it, apply the policy, and attach a new one"
        )
    taken = {layer.path for layer in applied}
    again = [layer for layer in chosen if layer.path in taken]
    if again:
        raise ArgumentError(
            f"model={kind} is not accepted: {_paths(again)} has a policy already; handle.remove() first"
        )
    if applied:
        first, second = (write_range(sorted({layer.layer for layer in group})) for group in (applied, chosen))
        raise ArgumentError(
            f"model={kind} is not accepted: {_paths(applied)} has a policy from another apply; handle.remove() first, "
            f"and give both in one plan: apply(model, {{'layers': {{{first!r}: ..., {second!r}: ...}}}})"
        )


def _refuse_existing(model: nn.Module, found: Mapping[str, list[Existing]]) -> None:
    scaled = {path: existing for path, existing in found.items() if existing}
    if scaled:
        path, (first, *_) = next(iter(scaled.items()))
        more = f" and {len(scaled) - 1} more" if len(scaled) > 1 else ""
        raise ArgumentError(
            f"model={type(transformers_model(model)).__name__} is not accepted: {path}{more} already scales its logits "
            f"({first.description}); pass on_existing='compose' to scale on top of it, or 'replace' to switch it off"
        )


def refuse_existing(model: nn.Module, chosen: list[AttentionLayer], on_existing: str) -> None:
    """Refuse layers that scale by length already, unless it was said what to do about it."""
    if on_existing not in ("raise", "compose", "replace"):
        reject("on_existing", on_existing, "'raise', 'compose' or 'replace'")
    if on_existing == "raise":
        _refuse_existing(model, {layer.path: find_existing(model, layer) for layer in chosen})


def build_policies(chosen: list[AttentionLayer], plan: Plan) -> dict[str, Policy]:
    """A policy for each layer, by path: of its own if it can have a state, else shared by the layers that are alike."""
    policies: dict[str, Policy] = {}
    shared: dict[Hashable, Policy] = {}
    for layer in chosen:
        policy = build_policy_of(plan, layer)
        finished = plan.finished(layer.layer)
        if not is_learned(policy) and (finished is None or isinstance(policy, FormulaPolicy)):
            # Layers that share a policy share its β of a length too.
            policy = shared.setdefault(repr(policy) if finished is None else id(finished), policy)
        policies[layer.path] = policy
    return policies


def build_policy_of(plan: Plan, layer: AttentionLayer) -> Policy:
    """The policy that a plan has for a layer; one that was built for another shape is refused."""
    policy = plan.build(layer.layer, num_heads=layer.num_heads or 1, head_dim=layer.head_dim or 1)
    check_shape(policy, layer)
    return policy


def _prove(model: nn.Module, chosen: list[AttentionLayer], inputs: Inputs | None) -> None:
    silent = run_probe(model, chosen, inputs)
    if silent:
        kind = type(transformers_model(model)).__name__
        raise ArgumentError(
            f"model={kind} is not accepted: a forward did not reach {_paths(silent)}, which would stay without a "
            "policy; leave it out with layers=..., or pass inputs that reach it as probe={...}"
        )


def _paths(layers: Sequence[AttentionLayer]) -> str:
    return few([layer.path for layer in layers])
