"""The attention implementation "attnscale", and `attach` for models whose config names it."""

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
    """Return the handle of a model that already has policies, or install the policies described by its config.

    The first case is a copy (deepcopy, pickle, EMA) of a model with policies; the copy has its own. The second is a
    model loaded by `from_pretrained(path, attn_implementation="attnscale")`. `handle.remove()` restores the stock
    model in both cases.

    Args:
        model: a transformers model or a wrapper of one.

    Returns:
        The `Handle` of the policies.

    Raises:
        ArgumentError: the config describes no policy, or one with learned values, which `from_pretrained` does not
            load; use `attnscale.hf.load`.

    Example:
        >>> import copy
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        >>> with attnscale.hf.apply(model, "log"):
        ...     average = copy.deepcopy(model)
        >>> attnscale.hf.attach(average).policies
        {'transformer.h.0.attn': Log(...)}
    """
    sites = [(layer.path, site_of(layer.module)) for layer in routed_layers(model).values()]
    policies = {path: site.policy for path, site in sites if site is not None}
    if not policies:
        policies = described_policies(model)
        learned = [policy for policy in policies.values() if is_learned(policy)]
        if learned:
            raise ArgumentError(
                f"policy {learned[0]} has learned values, which from_pretrained does not load: load the model with "
                "attnscale.hf.load(path), or load its policy with attnscale.hf.load_policy(model, path)"
            )
        return install(model, policies, on_existing=recorded_on_existing(model), loaded=True)
    configs = [config for config in configs_of(model) if applied_record(config) is not None]
    for config in configs:
        config.attnscale.models = max(config.attnscale.models, 1)
    record = configs[0].attnscale if configs else write_record(by_inner_path(policies, model))
    return Handle(model, policies, record, configs)


def current_record(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the record of the policies that a model has or will get in its first forward pass, or None."""
    configs = configs_of(model)
    for config in configs:
        if applied_record(config) is not None:
            return applied_record(config)
    if not any(config._attn_implementation == NAME and hasattr(config, NAME) for config in configs):
        return None
    return write_record(by_inner_path(described_policies(model), model), recorded_on_existing(model))


def described_policies(model: nn.Module, record: Mapping[str, Any] | None = None) -> dict[str, Policy]:
    """Return module path → policy, from a record or from the config of the model, without changing the model."""
    given = record_of(model) if record is None else record
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"config.attnscale={given!r} is not accepted: attn_implementation='attnscale' requires a policy, such as "
            "{'name': 'log', 'reference_length': 8192}; or load the stock model and call attnscale.hf.apply"
        )
    if MODULES in given:
        modules, inner = read_modules(given), transformers_model(model)
        located = locate_in(model, modules)
        missing = [path for path in modules if path not in located]
        # A model of another class may lack a part: an encoder model has no decoder.
        if missing and (not located or type(inner).__name__ in (inner.config.architectures or ())):
            raise ArgumentError(
                f"config.attnscale names {missing[0]}, which {type(inner).__name__} does not have. The checkpoint may "
                "come from another version of transformers: load it with attn_implementation='sdpa' and call "
                "attnscale.hf.apply"
            )
        entries = {path: modules[recorded] for recorded, path in located.items()}
        return {
            layer.path: check_fits(build_described(entries[path], **layer.shape), layer)
            for path, layer in routed_layers(model).items()
            if path in entries
        }
    # Written manually: a policy or a plan, with keywords of `apply`.
    options = dict(given) if "policy" in given else {"policy": given}
    plan = read_plan(options.pop("policy"))
    on_existing = str(options.pop(ON_EXISTING, "raise"))
    chosen = select(model, **options)
    refuse_existing(model, chosen, on_existing)
    return build_policies(plan, chosen)


def is_learned(policy: Policy) -> bool:
    """Whether a policy has parameters or buffers, which must be stored in checkpoints."""
    return isinstance(policy, nn.Module) and bool(policy.state_dict())


def register() -> None:
    """Register `attn_implementation="attnscale"` and its mask function; without the latter every mask is None."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def attention_forward(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Compute attention with the policy of a module's site, or with β = 1. Arguments: see `attend_at_site`.

    In a model loaded as "attnscale", the first call installs the policies.
    """
    if not is_decided(module) and not is_switched(module.config):
        _give_policies(module)
    return attend_at_site(site_of(module) or _STOCK, module, *args, **kwargs)


@torch.compiler.disable(reason="call attnscale.hf.attach(model) before torch.compile")  # type: ignore[untyped-decorator, no-untyped-call]
def _give_policies(module: nn.Module) -> None:
    """Install the policies described by the config of the model whose forward pass is running."""
    model = _running_model(module)
    if model is None:
        raise ArgumentError(
            f"{type(module).__name__} was called outside its model, which was loaded with "
            f"attn_implementation={NAME!r} and has no policies yet: call attnscale.hf.attach(model) first"
        )
    if recorded_on_existing(model) == "replace":
        raise ArgumentError(
            "config.attnscale has on_existing='replace', but this forward pass has already applied the model's own "
            "scaling: load the model with attnscale.hf.load(path), or call attnscale.hf.attach(model) before the first "
            "forward pass"
        )
    attach(model)
    if not is_decided(module):
        raise ArgumentError(
            f"{type(module).__name__} uses attn_implementation={NAME!r}, but attnscale.hf does not recognise it as an "
            "attention layer"
        )


def _running_model(module: nn.Module) -> PreTrainedModel | None:
    """Find the outermost transformers model on the call stack that contains a module; modules have no parent link."""
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
    """Return the mask of "sdpa": bool, or None if the module's `is_causal` is sufficient and reliable."""
    reliable = _has_reliable_causality(type(config))
    mask: Tensor | None = sdpa_mask(
        allow_is_causal_skip=allow_is_causal_skip and reliable,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and reliable,
        **arguments,
    )
    return mask


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_reliable_causality(kind: type[PreTrainedConfig]) -> bool:
    """Whether the attention modules of models with this config set `is_causal` correctly, as "sdpa" requires."""
    known = state.HF_KNOWN_CAUSALITY
    if kind not in known:
        models: Any = MODEL_MAPPING.get(kind, ())
        models = models if isinstance(models, (tuple, list)) else (models,)
        known[kind] = bool(models) and all(getattr(model, "_supports_sdpa", False) for model in models)
    return known[kind]
