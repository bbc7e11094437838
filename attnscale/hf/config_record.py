"""The record `config.attnscale` of which attention modules have which policy, written when a config is switched to us.

Modules are named by their paths in the transformers model, with ranges for the numbers of layers:

    {"modules": {"model.layers.0-31.self_attn": {"name": "log", "reference_length": 8192}}}
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import routed_layers, split_number
from attnscale.hf.sites import NAME, is_decided
from attnscale.policies import Policy, build_policy_for
from attnscale.policies.base import LengthPolicy
from attnscale.policies.build import find_policy

MODULES = "modules"
ON_EXISTING = "on_existing"

# The key of config.json from which `from_pretrained` takes the implementation, unless it is given one.
_SAVED = "attn_implementation"

# The tensor of an adapter's file that describes the policy of an attention module, and what became of the model's own
# scaling: JSON as bytes.
DESCRIPTION = "description"

# The key under which a description holds the class of a policy that has no registered name.
_CLASS = "class"

_RANGE = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def write_record(policies: Mapping[str, Policy], on_existing: str) -> dict[str, Any]:
    """The record of a model whose modules at these paths have these policies."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, policy in policies.items():
        pattern, number = split_number(path)
        description = json.dumps(describe(policy), sort_keys=True)
        groups.setdefault((pattern, description), []).extend([] if number is None else [number])
    modules = {
        pattern.replace("*", write_range(numbers), 1): json.loads(description)
        for (pattern, description), numbers in groups.items()
    }
    return {MODULES: modules} | ({} if on_existing == "raise" else {ON_EXISTING: on_existing})


def read_modules(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Path → description of its policy, for every module that a record names.

    >>> list(read_modules({"modules": {"layers.0,2-3.attention": {"name": "log"}}}))
    ['layers.0.attention', 'layers.2.attention', 'layers.3.attention']
    """
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, entry in record[MODULES].items():
        parts = [
            [str(number) for number in read_range(MODULES, part)] if _RANGE.fullmatch(part) else [part]
            for part in pattern.split(".")
        ]
        found |= {".".join(path): entry for path in itertools.product(*parts)}
    return found


def locate(recorded: Iterable[str], present: Iterable[str], prefix: str) -> dict[str, str]:
    """Recorded path → path in a model that may lack the head of the recorded one, or have one where that had none.

    `prefix` is the name under which a model with a head holds the model without it.

    >>> locate(["model.layers.0.self_attn"], ["layers.0.self_attn"], "model")
    {'model.layers.0.self_attn': 'layers.0.self_attn'}
    """
    known, found = set(present), {}
    for path in recorded:
        for candidate in (path, path.removeprefix(f"{prefix}."), f"{prefix}.{path}"):
            if candidate in known:
                found[path] = candidate
                break
    return found


def describe(policy: Policy) -> dict[str, Any]:
    """A policy as data for JSON: its name and fields, and its class where the name is not registered."""
    kind = type(policy)
    try:  # a field may be a policy too
        own = policy.to_dict() if isinstance(policy, LengthPolicy) else {}
        plain: dict[str, Any] = json.loads(json.dumps(own, default=lambda value: value.to_dict()))
    except (AttributeError, TypeError, ValueError):  # a class without a name, or fields that are no plain data
        plain = {}
    return plain if plain and find_policy(plain["name"]) is kind else plain | {_CLASS: kind.__qualname__}


def build_described(entry: Mapping[str, Any], *, num_heads: int, head_dim: int) -> Policy:
    """Inverse of `describe`, for a module of this shape; learned values are not part of a description."""
    plain = {key: value for key, value in entry.items() if key != _CLASS}
    kind, told = find_policy(plain.get("name")), entry.get(_CLASS)
    if kind is None or (told is not None and told != kind.__qualname__):
        what = told or plain.get("name")
        raise ArgumentError(
            f"config.attnscale names policy {what!r}, which is not registered: import the module that defines it and "
            "call attnscale.register_policy with its class before loading"
        )
    return build_policy_for(plain, num_heads=num_heads, head_dim=head_dim)


class Record(dict[str, Any]):
    """The entry `attnscale` of a switched config: plain data for config.json, and what `release` restores.

    `models` counts the models that use this config object. A copy of the config has a copy of the record with
    `models` = 0: the modules of its model know themselves whether they have policies.
    """

    def __init__(self, written: Mapping[str, Any], implementation: str | None, before: Any, models: int = 0) -> None:
        super().__init__(written)
        self.implementation = implementation
        self.before = before
        self.models = models

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (dict(self), self.implementation, self.before)


def has_record(config: Any) -> bool:
    """Whether a config was switched, or is a copy of one that was."""
    return isinstance(getattr(config, NAME, None), Record)


def is_switched(config: Any) -> bool:
    """Whether this very config object was switched and not released."""
    return has_record(config) and config.attnscale.models > 0


def record_of(model: nn.Module) -> Mapping[str, Any] | None:
    """`config.attnscale` of the first config of a model that has it."""
    found = (getattr(config, NAME, None) for config in configs_of(model))
    return next((record for record in found if isinstance(record, Mapping)), None)


def replaces_scaling(model: nn.Module) -> bool:
    """Whether the config of a model says that policies replace the model's own scaling."""
    return (record_of(model) or {}).get(ON_EXISTING) == "replace"


def is_pending(model: nn.Module) -> bool:
    """Whether a model was loaded with our name and has not been given its policies yet."""
    layers = [layer for layer in routed_layers(model).values() if layer.config._attn_implementation == NAME]
    return any(not is_decided(layer.module) and not is_switched(layer.config) for layer in layers)


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a module of a model refers to, the model's own first."""
    found = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


def switch(
    config: PreTrainedConfig,
    implementation: str | None,
    written: Mapping[str, Any],
    loaded: PreTrainedModel | None = None,
) -> None:
    """Record in a config what was applied to one more model, and set its implementation unless that is None.

    `release` restores the config as it is now; or, for a model `loaded` with our name, what transformers would choose.
    """
    before: Any = getattr(config, NAME, None)
    if is_switched(config):
        if before != written:
            raise ArgumentError(
                f"policy={dict(written)!r} is not accepted: this model shares its config with another one that has "
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
    setattr(config, NAME, Record(written, stock, before, models=1))
    if implementation is not None:
        config._attn_implementation_internal = implementation


def release(config: PreTrainedConfig) -> None:
    """Undo one `switch`; the last one restores the config."""
    if not has_record(config):
        return
    record: Record = config.attnscale
    record.models -= 1
    if record.models > 0:
        return
    delattr(config, NAME)
    config.__dict__.pop(_SAVED, None)
    if record.before is not None:
        setattr(config, NAME, record.before)
    config._attn_implementation_internal = record.implementation


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
