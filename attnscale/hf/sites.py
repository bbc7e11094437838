"""The policies of a transformers model: a child module of each attention that has one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.plan import read_plan
from attnscale.hf.survey import survey
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy

# The name of the child: `model.layers.0.self_attn.attnscale`, whose parameters the checkpoint then holds.
CHILD = "attnscale"

_STOCK = ScaledDotProductAttention("constant")


@dataclass
class Managed:
    """A configuration that `apply` switched: what it said before, and how many models it serves now."""

    config: weakref.ref[PreTrainedConfig]
    implementation: str | None
    before: Mapping[str, Any] | None
    written: Mapping[str, Any]
    models: int = 1


# By id: configurations have no hash.
_managed: dict[int, Managed] = {}


def has_site(module: nn.Module) -> bool:
    """Whether an attention has a policy of its own."""
    return module._modules.get(CHILD) is not None


def add_site(module: nn.Module, policy: Policy) -> None:
    """Give an attention a policy, on the device of its parameters and in fp32."""
    module.add_module(CHILD, ScaledDotProductAttention(policy))


def remove_site(module: nn.Module) -> None:
    """Take it away again."""
    module._modules.pop(CHILD, None)


def site_of(module: nn.Module, query: Tensor) -> nn.Module:
    """The attention that computes for a module: its own, stock where `apply` left it out, or what the config says."""
    site = module._modules.get(CHILD)
    if site is not None:
        return site
    config = module.config
    if is_managed(config):
        return _STOCK
    return site_from_config(module, config, num_heads=query.shape[1], head_dim=query.shape[3])


def site_from_config(module: nn.Module, config: Any, *, num_heads: int, head_dim: int) -> nn.Module:
    """The site that `config.attnscale` describes for a module, made at its first call."""
    given = getattr(config, "attnscale", None)
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"config.attnscale={given!r} is not accepted: attn_implementation='attnscale' needs a policy there, such "
            "as {'name': 'log', 'reference_length': 8192}; or load the model as it was and call attnscale.hf.apply"
        )
    options = dict(given) if "policy" in given else {"policy": given}
    plan, layer = read_plan(options.pop("policy")), getattr(module, "layer_idx", None)
    if options or ((plan.layers or plan.heads) and not isinstance(layer, int)):
        raise ArgumentError(
            f"config.attnscale={dict(given)!r} needs to know the model: load it with attnscale.hf.load(path)"
        )
    policy = plan.build(layer if isinstance(layer, int) else 0, num_heads=num_heads, head_dim=head_dim)
    if isinstance(policy, nn.Module) and policy.state_dict():
        raise ArgumentError(
            f"policy {policy} has parameters, which from_pretrained leaves out: load the model with attnscale.hf.load"
        )
    add_site(module, policy)
    return module._modules[CHILD]  # type: ignore[return-value]


def find_sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The sites that `config.attnscale` will give a model that was loaded with our name: made now rather than later."""
    for layer in survey(model) if any(isinstance(module, PreTrainedModel) for module in model.modules()) else ():
        if not layer.routed or has_site(layer.module) or is_managed(layer.config):
            continue
        if layer.config._attn_implementation == CHILD and layer.num_heads and layer.head_dim:
            shape = {"num_heads": layer.num_heads, "head_dim": layer.head_dim}
            yield layer.path, site_from_config(layer.module, layer.config, **shape)


def is_managed(config: object) -> bool:
    """Whether `apply` switched this configuration, so that modules without a site are to be left as they were."""
    entry = _managed.get(id(config))
    return entry is not None and entry.config() is config


def manage(config: PreTrainedConfig, implementation: str, written: Mapping[str, Any]) -> None:
    """Switch a configuration to an implementation and write the plan into it, for one model more."""
    entry = _managed.get(id(config))
    if entry is not None and entry.config() is config:
        if entry.written != written:
            raise ArgumentError(
                f"policy={dict(written)!r} is not accepted: this model shares its config with another one that has "
                f"{dict(entry.written)!r}; build it from a copy of the config"
            )
        entry.models += 1
        return
    before = getattr(config, "attnscale", None)
    _managed[id(config)] = Managed(weakref.ref(config), config._attn_implementation, before, written)
    config._attn_implementation_internal = implementation
    config.attnscale = dict(written)


def release(config: PreTrainedConfig) -> None:
    """Undo one `manage`; the last one restores the configuration."""
    entry = _managed[id(config)]
    entry.models -= 1
    if entry.models == 0:
        del _managed[id(config)], config.attnscale
        if entry.before is not None:
            config.attnscale = entry.before
        config._attn_implementation_internal = entry.implementation
