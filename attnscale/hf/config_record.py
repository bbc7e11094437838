"""`config.attnscale`: the record of a model's policies, written when its config is switched to "attnscale"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import routed_layers, transformers_model
from attnscale.hf.sites import is_decided
from attnscale.policies.record import NAME, ON_EXISTING, locate

# Key of config.json that holds the default attention implementation of `from_pretrained`.
_SAVED = "attn_implementation"


class AppliedRecord(dict[str, Any]):
    """`config.attnscale` of a switched config: plain data for config.json, and the state that `release` restores.

    `models` counts the models that share this config object. It is 0 in a copy of the config: the copied modules
    themselves carry the policies.
    """

    def __init__(self, written: Mapping[str, Any], implementation: str | None, before: Any, models: int = 0) -> None:
        super().__init__(written)
        self.implementation = implementation
        self.before = before
        self.models = models

    def __reduce__(self) -> tuple[Any, ...]:
        return AppliedRecord, (dict(self), self.implementation, self.before)


def applied_record(config: Any) -> AppliedRecord | None:
    """Return the record of a switched config or of a copy of one, or None."""
    record = getattr(config, NAME, None)
    return record if isinstance(record, AppliedRecord) else None


def is_switched(config: Any) -> bool:
    """Whether this config object, not a copy of it, was switched and not released."""
    record = applied_record(config)
    return record is not None and record.models > 0


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Return every config referenced by a module of a model, the model's own first."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def record_of(model: nn.Module) -> Mapping[str, Any] | None:
    """Return `config.attnscale` of the first config of a model that has it, or None."""
    found = (getattr(config, NAME, None) for config in configs_of(model))
    return next((record for record in found if isinstance(record, Mapping)), None)


def recorded_on_existing(model: nn.Module) -> str:
    """Return `on_existing` from the record of a model."""
    return str((record_of(model) or {}).get(ON_EXISTING, "raise"))


def locate_in(model: nn.Module, recorded: Iterable[str]) -> dict[str, str]:
    """Return recorded path → layer path in a transformers model, which may have another head or a wrapper."""
    return locate(recorded, routed_layers(model), transformers_model(model).base_model_prefix)


def is_pending(model: nn.Module) -> bool:
    """Whether a model was loaded as "attnscale" and its policies are not installed yet."""
    layers = [layer for layer in routed_layers(model).values() if layer.config._attn_implementation == NAME]
    return any(not is_decided(layer.module) and not is_switched(layer.config) for layer in layers)


def switch(
    config: PreTrainedConfig,
    implementation: str | None,
    written: Mapping[str, Any],
    loaded: PreTrainedModel | None = None,
) -> None:
    """Write the record of one more model into a config, and set its implementation unless that is None.

    `release` restores the current config or, for a model `loaded` as "attnscale", the default of transformers.
    """
    before: Any = getattr(config, NAME, None)
    if is_switched(config):
        if before != written:
            raise ArgumentError(
                f"policy={dict(written)!r} is not accepted: the model shares its config object with a model that has "
                f"{dict(before)!r}; build it from a copy of the config"
            )
        before.models += 1
        return
    stock = config._attn_implementation
    if loaded is not None:
        before = None
        owners = [one for one in loaded.modules() if isinstance(one, PreTrainedModel) and one.config is config]
        if stock == NAME:
            stock = (owners[0] if owners else loaded).get_correct_attn_implementation(None)
    setattr(config, NAME, AppliedRecord(written, stock, before, models=1))
    if implementation is not None:
        config._attn_implementation_internal = implementation


def release(config: PreTrainedConfig) -> None:
    """Undo one `switch`. Undoing the last one restores the config."""
    record = applied_record(config)
    if record is None:
        return
    record.models -= 1
    if record.models > 0:
        return
    delattr(config, NAME)
    config.__dict__.pop(_SAVED, None)
    if record.before is not None:
        setattr(config, NAME, record.before)
    config._attn_implementation_internal = record.implementation


def save_implementation(top: PreTrainedConfig, switched: Iterable[PreTrainedConfig]) -> None:
    """Make config.json name the implementation "attnscale", so that `from_pretrained` selects it."""
    wanted = _implementation_of(top, {id(config) for config in switched})
    if wanted is not None:
        setattr(top, _SAVED, wanted)


def _implementation_of(config: PreTrainedConfig, switched: set[int]) -> str | dict[str, Any] | None:
    """Return "attnscale" for a switched config, or a mapping for its switched parts, as `from_pretrained` accepts."""
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {}}
    found = {
        key: _implementation_of(part, switched) for key, part in parts.items() if isinstance(part, PreTrainedConfig)
    }
    inner = {key: value for key, value in found.items() if value is not None}
    if id(config) not in switched:
        return inner or None
    return {"": NAME, **inner} if parts else NAME
