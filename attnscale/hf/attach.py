"""Handles for models that have a policy but none at hand: copies, and models that were loaded by our name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.configs import NAME, as_without_us, configs_of, is_switched
from attnscale.hf.handle import Handle
from attnscale.hf.install import check_shape, install, path_of_transformers_model
from attnscale.hf.patch import build_policies, refuse_existing, select
from attnscale.hf.plan import read_plan
from attnscale.hf.record import MODULES, ON_EXISTING, Record, build_described, locate, read_modules, write_record
from attnscale.hf.sites import CHILD, has_site, is_decided, is_learned, site_at
from attnscale.hf.survey import AttentionLayer, survey, transformers_model
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy

_STOCK = ScaledDotProductAttention("constant")


def attach(model: nn.Module) -> Handle:
    """A handle for a model that has policies already, or whose config says which it is to have.

    The first is a copy of a model that `apply` was called on (deepcopy, pickle, an EMA copy), whose policies are its
    own; the second was loaded by `from_pretrained(path, attn_implementation="attnscale")`. `handle.remove()` takes the
    policies away and leaves the stock model.

        ema = torch.optim.swa_utils.AveragedModel(model)
        handle = attnscale.hf.attach(ema)
    """
    layers = [layer for layer in survey(model) if layer.routed]
    policies = {layer.path: site_at(layer.module).policy for layer in layers if has_site(layer.module)}
    if not policies:
        policies = described_policies(model)
        learned = [policy for policy in policies.values() if is_learned(policy)]
        if learned:
            raise ArgumentError(
                f"policy {learned[0]} has parameters, which from_pretrained leaves out: load the model with "
                "attnscale.hf.load(path), or give it its policy with attnscale.hf.load_policy(model, path)"
            )
        return install_described(model, policies)
    configs = [config for config in configs_of(model) if isinstance(getattr(config, NAME, None), Record)]
    for config in configs:
        config.attnscale.models = max(config.attnscale.models, 1)
    prefix = path_of_transformers_model(model)
    record = next((config.attnscale for config in configs), None)
    if record is None:
        record = write_record({path.removeprefix(prefix): policy for path, policy in policies.items()}, "raise")
    return Handle(model, policies, record, [layer.module for layer in layers], configs)


def site_of(module: nn.Module) -> nn.Module:
    """The attention that computes for a module: its own, or stock attention where it was left out.

    A model that was loaded by our name is given its policies at its first forward.
    """
    site = module._modules.get(CHILD)
    if site is not None:
        return site
    if is_decided(module) or is_switched(module.config):
        return _STOCK
    _give_policies(module)
    return site_of(module)


def find_sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The sites that the config will give a model that was loaded with our name: made now rather than later."""
    if any(isinstance(module, PreTrainedModel) for module in model.modules()) and is_pending(model):
        for path in attach(model).policies:
            yield path, site_at(model.get_submodule(path))


def is_pending(model: nn.Module) -> bool:
    """Whether a model was loaded with our name and has not been given its policies yet."""
    return any(
        layer.routed
        and layer.config._attn_implementation == NAME
        and not is_decided(layer.module)
        and not is_switched(layer.config)
        for layer in survey(model)
    )


def described_policies(model: nn.Module, described: Mapping[str, Any] | None = None) -> dict[str, Policy]:
    """Path → policy, as a description says, or else the config of the model; nothing is put into the model."""
    given = described_in(model) if described is None else described
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"config.attnscale={given!r} is not accepted: attn_implementation='attnscale' needs a policy there, such "
            "as {'name': 'log', 'reference_length': 8192}; or load the model as it was and call attnscale.hf.apply"
        )
    if MODULES not in given:  # written by hand: a policy or a plan, and keywords of `apply`
        options = dict(given) if "policy" in given else {"policy": given}
        plan = read_plan(options.pop("policy"))
        on_existing = str(options.pop(ON_EXISTING, "raise"))
        chosen = select(model, **options)
        refuse_existing(model, chosen, on_existing)
        return build_policies(chosen, plan)
    layers = _located(model, read_modules(given))
    return _shared({layer.path: _build(layer, entry) for layer, entry in layers})


def install_described(
    model: nn.Module, policies: Mapping[str, Policy], described: Mapping[str, Any] | None = None
) -> Handle:
    """Put described policies into a model; to remove them leaves what transformers itself would have loaded."""
    given = described or described_in(model) or {}
    stock = partial(as_without_us, model=transformers_model(model))
    return install(model, policies, on_existing=given.get(ON_EXISTING, "raise"), stock=stock)


def described_in(model: nn.Module) -> Mapping[str, Any] | None:
    """What `config.attnscale` says in the first config of a model that has it."""
    found = (getattr(config, NAME, None) for config in configs_of(transformers_model(model)))
    return next((given for given in found if isinstance(given, Mapping)), None)


def _located(
    model: nn.Module, modules: Mapping[str, Mapping[str, Any]]
) -> list[tuple[AttentionLayer, Mapping[str, Any]]]:
    """The layers of a model that a record names, in the order of the model."""
    inner, prefix = transformers_model(model), path_of_transformers_model(model)
    layers = {layer.path.removeprefix(prefix): layer for layer in survey(model) if layer.routed}
    found = {path: there for there, path in locate(modules, layers, inner.base_model_prefix).items()}
    missing = [path for path in modules if path not in found.values()]
    # A model of another class may lack a part: an encoder alone has no decoder.
    if missing and (not found or type(inner).__name__ in (inner.config.architectures or ())):
        raise ArgumentError(
            f"config.attnscale names {missing[0]}, which {type(inner).__name__} does not have: was it saved by another "
            "version of transformers? Load it with attn_implementation='sdpa' and call attnscale.hf.apply"
        )
    return [(layer, modules[found[path]]) for path, layer in layers.items() if path in found]


def _build(layer: AttentionLayer, entry: Mapping[str, Any]) -> Policy:
    policy = build_described(entry, num_heads=layer.num_heads or 1, head_dim=layer.head_dim or 1)
    check_shape(policy, layer)
    return policy


def _shared(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """One object for all layers whose policies are alike and learn nothing: they share the β of a length too."""
    one: dict[str, Policy] = {}
    return {
        path: policy if is_learned(policy) else one.setdefault(repr(policy), policy)
        for path, policy in policies.items()
    }


@torch.compiler.disable(reason="call attnscale.hf.attach(model) before torch.compile")  # type: ignore[untyped-decorator, no-untyped-call]
def _give_policies(module: nn.Module) -> None:
    """Let the model whose forward is running have the policies that its config describes."""
    model = running_model(module)
    if model is None:
        raise ArgumentError(
            f"{type(module).__name__} was called outside of its model, which was loaded by the name {NAME!r} and has "
            "not been given its policies yet: call attnscale.hf.attach(model) first"
        )
    attach(model)
    if not is_decided(module):
        raise ArgumentError(f"{type(module).__name__} asks for attnscale in a way that attnscale.hf does not know")


def running_model(module: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model on the stack that holds a module: modules do not know what holds them."""
    frame, found, seen = sys._getframe(1), None, set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, PreTrainedModel) and id(owner) not in seen:
            seen.add(id(owner))
            if any(inner is module for inner in owner.modules()):
                found = owner
        frame = frame.f_back  # type: ignore[assignment]
    return found
