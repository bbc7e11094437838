"""The implementation "attnscale" of transformers, and models that get their policies by that name in their config."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from attnscale._util import state
from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import routed_layers, transformers_model
from attnscale.hf.config_record import (
    applied_record,
    configs_of,
    is_switched,
    locate_in,
    record_of,
    recorded_on_existing,
)
from attnscale.hf.install import Handle, by_inner_path, install
from attnscale.hf.plan import build_policies, check_fits, read_plan
from attnscale.hf.selection import refuse_existing, select
from attnscale.hf.sites import attend_at_site, is_decided, site_of
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy
from attnscale.policies.record import MODULES, NAME, ON_EXISTING, build_described, read_modules, write_record

_STOCK = ScaledDotProductAttention("constant")


def attach(model: nn.Module) -> Handle:
    """A handle for a model that has policies already, or whose config says which it is to have.

    The first is a copy of a model that `apply` was called on (deepcopy, pickle, an EMA copy), whose policies are its
    own; the second was loaded by `from_pretrained(path, attn_implementation="attnscale")`. `handle.remove()` takes the
    policies out and leaves the stock model.

        ema = torch.optim.swa_utils.AveragedModel(model)
        handle = attnscale.hf.attach(ema)
    """
    sites = [(layer.path, site_of(layer.module)) for layer in routed_layers(model).values()]
    policies = {path: site.policy for path, site in sites if site is not None}
    if not policies:
        policies = described_policies(model)
        learned = [policy for policy in policies.values() if is_learned(policy)]
        if learned:
            raise ArgumentError(
                f"policy {learned[0]} has parameters, which from_pretrained leaves out: load the model with "
                "attnscale.hf.load(path), or give it its policy with attnscale.hf.load_policy(model, path)"
            )
        return install(model, policies, on_existing=recorded_on_existing(model), loaded=True)
    configs = [config for config in configs_of(model) if applied_record(config) is not None]
    for config in configs:
        config.attnscale.models = max(config.attnscale.models, 1)
    record = configs[0].attnscale if configs else write_record(by_inner_path(policies, model))
    return Handle(model, policies, record, configs)


def current_record(model: nn.Module) -> Mapping[str, Any] | None:
    """The record of the policies that a model has, or gets at its first forward; None where there are none."""
    configs = configs_of(model)
    for config in configs:
        if applied_record(config) is not None:
            return applied_record(config)
    if not any(config._attn_implementation == NAME and hasattr(config, NAME) for config in configs):
        return None
    return write_record(by_inner_path(described_policies(model), model), recorded_on_existing(model))


def described_policies(model: nn.Module, record: Mapping[str, Any] | None = None) -> dict[str, Policy]:
    """Path → policy, from a record or else from the config of the model. Nothing is put into the model."""
    given = record_of(model) if record is None else record
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"config.attnscale={given!r} is not accepted: attn_implementation='attnscale' needs a policy there, such "
            "as {'name': 'log', 'reference_length': 8192}; or load the model as it was and call attnscale.hf.apply"
        )
    if MODULES in given:
        modules, inner = read_modules(given), transformers_model(model)
        located = locate_in(model, modules)
        missing = [path for path in modules if path not in located]
        # A model of another class may lack a part: an encoder alone has no decoder.
        if missing and (not located or type(inner).__name__ in (inner.config.architectures or ())):
            raise ArgumentError(
                f"config.attnscale names {missing[0]}, which {type(inner).__name__} does not have: was it saved by "
                "another version of transformers? Load it with attn_implementation='sdpa' and call attnscale.hf.apply"
            )
        entries = {path: modules[recorded] for recorded, path in located.items()}
        return {
            layer.path: check_fits(build_described(entries[path], **layer.shape), layer)
            for path, layer in routed_layers(model).items()
            if path in entries
        }
    # Written by hand: a policy or a plan, and keywords of `apply`.
    options = dict(given) if "policy" in given else {"policy": given}
    plan = read_plan(options.pop("policy"))
    on_existing = str(options.pop(ON_EXISTING, "raise"))
    chosen = select(model, **options)
    refuse_existing(model, chosen, on_existing)
    return build_policies(plan, chosen)


def is_learned(policy: Policy) -> bool:
    """Whether a policy has parameters or buffers, which a checkpoint has to hold."""
    return isinstance(policy, nn.Module) and bool(policy.state_dict())


def register() -> None:
    """Make `attn_implementation="attnscale"` known; without an entry for the mask every mask would be None."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of a module with the policy of its site, or with β = 1; arguments are those of `attend_at_site`.

    A model that was loaded with our name is given its policies at its first forward.
    """
    if not is_decided(module) and not is_switched(module.config):
        _give_policies(module)
    return attend_at_site(site_of(module) or _STOCK, module, *args, **kwargs)


@torch.compiler.disable(reason="call attnscale.hf.attach(model) before torch.compile")  # type: ignore[untyped-decorator, no-untyped-call]
def _give_policies(module: nn.Module) -> None:
    """Give the model whose forward is running the policies that its config describes."""
    model = _running_model(module)
    if model is None:
        raise ArgumentError(
            f"{type(module).__name__} was called outside of its model, which was loaded by the name {NAME!r} and has "
            "not been given its policies yet: call attnscale.hf.attach(model) first"
        )
    if recorded_on_existing(model) == "replace":
        raise ArgumentError(
            "config.attnscale says on_existing='replace', and this forward has computed the model's own scaling "
            "already: load the model with attnscale.hf.load(path), or call attnscale.hf.attach(model) before its first "
            "forward"
        )
    attach(model)
    if not is_decided(module):
        raise ArgumentError(f"{type(module).__name__} asks for attnscale in a way that attnscale.hf does not know")


def _running_model(module: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model on the call stack that holds a module: modules do not know what holds them."""
    frame, found, seen = sys._getframe(1), None, set()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, PreTrainedModel) and id(owner) not in seen:
            seen.add(id(owner))
            if any(inner is module for inner in owner.modules()):
                found = owner
        frame = frame.f_back  # type: ignore[assignment]
    return found


def make_mask(
    *, config: Any, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **arguments: Any
) -> Tensor | None:
    """The mask of "sdpa": bool, or None where the module's `is_causal` suffices and can be relied on."""
    reliable = _tells_causality(type(config))
    mask: Tensor | None = sdpa_mask(
        allow_is_causal_skip=allow_is_causal_skip and reliable,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and reliable,
        **arguments,
    )
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tells_causality(kind: type[PreTrainedConfig]) -> bool:
    """Whether attention modules of models with this config have the right `is_causal`: "sdpa" relies on it too."""
    known = state.HF_KNOWN_CAUSALITY
    if kind not in known:
        models: Any = MODEL_MAPPING.get(kind, ())
        models = models if isinstance(models, (tuple, list)) else (models,)
        known[kind] = bool(models) and all(getattr(model, "_supports_sdpa", False) for model in models)
    return known[kind]
