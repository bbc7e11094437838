"""Policies that a config describes: given to a model that was loaded with them, and handles for copies of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf import config_record
from attnscale.hf.attention_layers import routed_layers, transformers_model
from attnscale.hf.install import Handle, by_inner_path, install
from attnscale.hf.plan import build_policies, check_fits, read_plan
from attnscale.hf.policy_files import is_of_policy
from attnscale.hf.selection import refuse_existing, select
from attnscale.hf.sites import NAME, is_learned, site_of
from attnscale.policies import Policy


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
        on_existing = (config_record.record_of(model) or {}).get(config_record.ON_EXISTING, "raise")
        return install(model, policies, on_existing=on_existing, loaded=True)
    configs = [config for config in config_record.configs_of(model) if config_record.has_record(config)]
    for config in configs:
        config.attnscale.models = max(config.attnscale.models, 1)
    record = next((config.attnscale for config in configs), None)
    if record is None:
        record = config_record.write_record(by_inner_path(policies, model), "raise")
    return Handle(model, policies, record, configs)


def attach_replacements(model: nn.Module) -> None:
    """Attach the policies of a model that was loaded with our name if they replace the model's own scaling.

    Its first forward computes that scaling before it calls an attention module. Policies that learn are left out, as
    `from_pretrained` does not load what they have learned.
    """
    if not config_record.replaces_scaling(model) or not config_record.is_pending(model):
        return
    if not any(map(is_learned, described_policies(model).values())):
        attach(model)


def current_record(model: nn.Module) -> Mapping[str, Any] | None:
    """The record of the policies that a model has, or gets at its first forward; None where there are none."""
    configs = config_record.configs_of(model)
    written: list[Mapping[str, Any]] = [config.attnscale for config in configs if config_record.has_record(config)]
    if written:
        return written[0]
    if not any(config._attn_implementation == NAME and hasattr(config, NAME) for config in configs):
        return None
    on_existing = (config_record.record_of(model) or {}).get(config_record.ON_EXISTING, "raise")
    return config_record.write_record(by_inner_path(described_policies(model), model), on_existing)


def install_recorded(
    model: nn.Module, record: Mapping[str, Any], read: Callable[[PreTrainedModel], Mapping[str, Tensor]], path: str
) -> Handle:
    """Give a model the policies of a record and what they have learned, which `read` finds once they are there.

    Names of the tensors are those in the transformers model. `path` is for the message where one is missing.
    """
    on_existing = record.get(config_record.ON_EXISTING, "raise")
    handle = install(model, described_policies(model, record), on_existing=on_existing, loaded=True)
    inner = transformers_model(model)
    try:
        learned = read(inner)
        wanted = [name for name in inner.state_dict() if is_of_policy(name)]
        missing = [name for name in wanted if name not in learned]
        if missing:
            raise ArgumentError(f"path={path!r} is not accepted: {missing[0]} is not in its safetensors")
        inner.load_state_dict({name: learned[name] for name in wanted}, strict=False)
    except BaseException:
        handle.remove()
        raise
    return handle


def described_policies(model: nn.Module, record: Mapping[str, Any] | None = None) -> dict[str, Policy]:
    """Path → policy, from a record or else from the config of the model. Nothing is put into the model."""
    given = config_record.record_of(model) if record is None else record
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"config.attnscale={given!r} is not accepted: attn_implementation='attnscale' needs a policy there, such "
            "as {'name': 'log', 'reference_length': 8192}; or load the model as it was and call attnscale.hf.apply"
        )
    if config_record.MODULES in given:
        modules, inner, layers = config_record.read_modules(given), transformers_model(model), routed_layers(model)
        located = config_record.locate(modules, layers, inner.base_model_prefix)
        missing = [path for path in modules if path not in located]
        # A model of another class may lack a part: an encoder alone has no decoder.
        if missing and (not located or type(inner).__name__ in (inner.config.architectures or ())):
            raise ArgumentError(
                f"config.attnscale names {missing[0]}, which {type(inner).__name__} does not have: was it saved by "
                "another version of transformers? Load it with attn_implementation='sdpa' and call attnscale.hf.apply"
            )
        entries = {path: modules[recorded] for recorded, path in located.items()}
        return {
            layer.path: check_fits(config_record.build_described(entries[path], **layer.shape), layer)
            for path, layer in layers.items()
            if path in entries
        }
    # Written by hand: a policy or a plan, and keywords of `apply`.
    options = dict(given) if "policy" in given else {"policy": given}
    plan = read_plan(options.pop("policy"))
    on_existing = str(options.pop(config_record.ON_EXISTING, "raise"))
    chosen = select(model, **options)
    refuse_existing(model, chosen, on_existing)
    return build_policies(plan, chosen)
