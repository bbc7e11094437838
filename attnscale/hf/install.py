"""Put policies into a transformers model and take them out: what `apply`, `attach` and `load` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError, reject
from attnscale.hf.configs import NAME, SDPA, as_it_is, ask_for_us_when_loaded, configs_of, switch
from attnscale.hf.existing import find_existing
from attnscale.hf.handle import Handle, take_out
from attnscale.hf.parallel import refuse_wrapped
from attnscale.hf.record import Record, write_record
from attnscale.hf.sites import add_site, has_site, is_decided, leave_alone, site_at
from attnscale.hf.survey import AttentionLayer, survey, transformers_model
from attnscale.policies import Policy

Stock = Callable[[PreTrainedConfig], Record]


def install(
    model: nn.Module,
    policies: Mapping[str, Policy],
    *,
    on_existing: str = "raise",
    override: bool = False,
    stock: Stock = as_it_is,
) -> Handle:
    """Give the modules at these paths these policies, and every other attention a note that it has none.

    `stock` says what a config goes back to when the handle is removed. Nothing is left behind where this raises.
    """
    if any(isinstance(policy, nn.Module) and any(True for _ in policy.parameters()) for policy in policies.values()):
        refuse_wrapped(model)
    layers = [layer for layer in survey(model) if layer.routed]
    applied = [layer.path for layer in layers if has_site(layer.module)]
    if applied:
        raise ArgumentError(
            f"model={type(transformers_model(model)).__name__} is not accepted: {applied[0]} has a policy already; "
            "handle.remove() first, and give all layers theirs in one call: policy={'layers': {'0-3': ..., '4-7': ...}}"
        )
    chosen = [layer for layer in layers if layer.path in policies]
    inner, prefix = transformers_model(model), path_of_transformers_model(model)
    written = write_record({path.removeprefix(prefix): policy for path, policy in policies.items()}, on_existing)
    switched: list[PreTrainedConfig] = []
    # All are found before any is switched off: layers share what carries the factor.
    found = {layer.path: find_existing(model, layer) if on_existing == "replace" else [] for layer in chosen}
    try:
        for layer in chosen:
            policy = policies[layer.path]
            if isinstance(policy, nn.Module):
                policy.to(_device(layer.module))
            add_site(layer.module, policy, override=override)
            for existing in found[layer.path]:
                site_at(layer.module).undo.append(existing.switch_off())
        for layer in layers:
            if not is_decided(layer.module):
                leave_alone(layer.module)
        configs = _configs(inner, chosen, override)
        for config, implementation in configs:
            switch(config, implementation, written, stock(config))
            switched.append(config)
        ask_for_us_when_loaded(inner.config, [config for config, asks in configs if asks is not None])
    except BaseException:
        take_out([layer.module for layer in layers], switched)
        raise
    return Handle(model, policies, written, [layer.module for layer in layers], switched)


def path_of_transformers_model(model: nn.Module) -> str:
    """What precedes the paths of a transformers model inside a wrapper, with its dot; nothing without a wrapper."""
    inner = transformers_model(model)
    path = next(path for path, module in model.named_modules() if module is inner)
    return f"{path}." if path else ""


def check_shape(policy: Policy, layer: AttentionLayer) -> None:
    """Refuse a policy that was built for another number of heads, or other heads, than a layer has."""
    for name, own in (("num_heads", layer.num_heads), ("head_dim", layer.head_dim)):
        built = getattr(policy, name, None)
        if isinstance(built, int) and own is not None and built != own:
            raise ArgumentError(
                f"policy={policy!r} is not accepted: it was built for {name}={built}, and {layer.path} has {name}={own}"
            )


def _configs(
    inner: PreTrainedModel, chosen: list[AttentionLayer], override: bool
) -> list[tuple[PreTrainedConfig, str | None]]:
    """Configs to switch, and to which implementation; None where only the record is kept there."""
    asked = {id(layer.config): layer.config for layer in chosen}
    top = inner.config
    if not getattr(top, "sub_configs", None):
        asked[id(top)] = top  # the one that is saved: stacks may hold copies
    if override:
        for config in asked.values():
            if config._attn_implementation != SDPA:
                reject("attn_implementation", config._attn_implementation, f"{SDPA!r} with override=True")
    configs: list[tuple[PreTrainedConfig, str | None]] = [
        (config, SDPA if override else NAME) for config in asked.values()
    ]
    # A part that was loaded with our name, and has no policy, has to forget it too when the handle is removed.
    others = [config for config in configs_of(inner) if config is top or config._attn_implementation == NAME]
    return configs + [(config, None) for config in others if id(config) not in asked]


def _device(module: nn.Module) -> torch.device:
    """Where a module computes; one that is offloaded keeps its parameters elsewhere."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    return next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))
