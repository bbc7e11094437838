"""Switch the configs of a transformers model to our attention and back, and keep there what was applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.record import Record

NAME = "attnscale"
SDPA = "sdpa"

# The key of config.json that `from_pretrained` takes the implementation from where it is not told one.
_SAVED = "attn_implementation"


def is_switched(config: object) -> bool:
    """Whether `apply` switched this very config, for a model whose modules know whether they have a policy."""
    record = getattr(config, NAME, None)
    return isinstance(record, Record) and record.models > 0


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a module of a model refers to, the model's own first."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def switch(config: PreTrainedConfig, implementation: str | None, written: Mapping[str, Any], stock: Record) -> None:
    """Write down in a config what was applied, for one model more, and let it ask for an implementation, if any.

    `stock` holds what to go back to.
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


def as_it_is(config: PreTrainedConfig) -> Record:
    """What `release` goes back to where `apply` switches a config that is not ours yet."""
    return Record({}, config._attn_implementation, getattr(config, NAME, None))


def as_without_us(config: PreTrainedConfig, model: PreTrainedModel) -> Record:
    """What `release` goes back to for a config that was loaded with our name: what transformers itself would choose."""
    if config._attn_implementation != NAME:
        return Record({}, config._attn_implementation)
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is config]
    return Record({}, (owners[0] if owners else model).get_correct_attn_implementation(None))


def ask_for_us_when_loaded(top: PreTrainedConfig, switched: Iterable[PreTrainedConfig]) -> None:
    """Let a config that is saved say that its model wants our attention, so that `from_pretrained` asks for it."""
    wanted = _wanted(top, {id(config) for config in switched})
    if wanted is not None:
        setattr(top, _SAVED, wanted)


def _wanted(config: PreTrainedConfig, switched: set[int]) -> str | dict[str, Any] | None:
    """The name for a config, or for those of its parts that were switched, in the form that transformers takes."""
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {}}
    inner = {key: _wanted(part, switched) for key, part in parts.items() if isinstance(part, PreTrainedConfig)}
    inner = {key: value for key, value in inner.items() if value is not None}
    if id(config) not in switched:
        return dict(inner) or None
    return {"": NAME, **inner} if parts else NAME
