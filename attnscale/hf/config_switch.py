"""Switch the configs of a transformers model to our attention and back; each keeps a record of what was applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.sites import NAME

# The key of config.json from which `from_pretrained` takes the implementation, unless it is given one.
_SAVED = "attn_implementation"


class Record(dict[str, Any]):
    """The entry `attnscale` of a switched config: plain data for config.json, and what `release` restores.

    `models` counts the models that use this config object. A copy of the config has a copy of the record with
    `models` = 0: the modules of its model know themselves whether they have policies.
    """

    def __init__(
        self,
        written: Mapping[str, Any],
        implementation: str | None = None,
        before: Mapping[str, Any] | None = None,
        models: int = 0,
    ) -> None:
        super().__init__(written)
        self.implementation = implementation
        self.before = before
        self.models = models

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (dict(self), self.implementation, self.before)


def is_switched(config: object) -> bool:
    """Whether this very config object was switched and not released."""
    record = getattr(config, NAME, None)
    return isinstance(record, Record) and record.models > 0


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a module of a model refers to, the model's own first."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def switch(config: PreTrainedConfig, implementation: str | None, written: Mapping[str, Any], stock: Record) -> None:
    """Record in a config what was applied to one more model, and set its implementation unless that is None.

    `stock` holds what `release` restores.
    """
    record = getattr(config, NAME, None)
    if isinstance(record, Record) and record.models:
        if record != written:
            raise ArgumentError(
                f"policy={dict(written)!r} is not accepted: this model shares its config with another one that has "
                f"{dict(record)!r}; build it from a copy of the config"
            )
        record.models += 1
        return
    setattr(config, NAME, Record(written, stock.implementation, stock.before, models=1))
    if implementation is not None:
        config._attn_implementation_internal = implementation


def release(config: PreTrainedConfig) -> None:
    """Undo one `switch`; the last one restores the config."""
    record = getattr(config, NAME, None)
    if not isinstance(record, Record):
        return
    record.models -= 1
    if record.models > 0:
        return
    delattr(config, NAME)
    config.__dict__.pop(_SAVED, None)
    if record.before is not None:
        setattr(config, NAME, record.before)
    config._attn_implementation_internal = record.implementation


def current_state(config: PreTrainedConfig) -> Record:
    """For `switch`: restore the config as it is now."""
    return Record({}, config._attn_implementation, getattr(config, NAME, None))


def stock_state(config: PreTrainedConfig, model: PreTrainedModel) -> Record:
    """For `switch`: restore what transformers would have chosen for a config that was loaded with our name."""
    if config._attn_implementation != NAME:
        return Record({}, config._attn_implementation)
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]
    return Record({}, (owners[0] if owners else model).get_correct_attn_implementation(None))


def save_implementation(top: PreTrainedConfig, switched: Iterable[PreTrainedConfig]) -> None:
    """Let config.json name our implementation, so that `from_pretrained` uses it."""
    wanted = _implementation_of(top, {id(config) for config in switched})
    if wanted is not None:
        setattr(top, _SAVED, wanted)


def _implementation_of(config: PreTrainedConfig, switched: set[int]) -> str | dict[str, Any] | None:
    """Our name for a switched config, or a mapping for its switched parts, as `from_pretrained` takes it."""
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {}}
    found = {
        key: _implementation_of(part, switched) for key, part in parts.items() if isinstance(part, PreTrainedConfig)
    }
    inner = {key: value for key, value in found.items() if value is not None}
    if id(config) not in switched:
        return inner or None
    return {"": NAME, **inner} if parts else NAME
