"""The factor that a rotary embedding puts on queries and keys: whose it is, and how to do without it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnscale.hf.source import read_forward
from attnscale.hf.survey import AttentionLayer, survey
from attnscale.hf.switching import Restore, change_argument, set_attribute, takes_argument

_ARGUMENT = "position_embeddings"
_FACTOR = "attention_scaling"
_BY_LENGTH = ("short_mscale", "long_mscale")

# Attention modules that do without the factor, per rotary embedding and the name of the factor in it.
_without: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.WeakSet[nn.Module]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding as one layer sees it: `name` is the attribute with the factor, `dims` how many it rotates."""

    owner: nn.Module
    name: str
    kind: str
    dims: int

    @property
    def factors(self) -> tuple[float, ...]:
        """What cos and sin are multiplied by: one number, or one for short and one for long inputs."""
        parameters = getattr(getattr(self.owner, "config", None), "rope_parameters", None) or {}
        if self.kind != "default" and "long_mscale" in read_forward(type(self.owner)).text:
            return tuple(float(parameters[name]) for name in _BY_LENGTH)
        return (float(getattr(self.owner, self.name)),)


@dataclass(frozen=True, eq=False)
class _FactorBack:
    """Lets a layer rotate with the factor again. An object: in a copy of the model it refers to the copy."""

    module: nn.Module
    rotary: Rotary
    factor: float
    unhook: Restore

    def __call__(self) -> None:
        self.unhook()
        _without.get(self.rotary.owner, {}).get(self.rotary.name, weakref.WeakSet()).discard(self.module)
        setattr(self.rotary.owner, self.rotary.name, self.factor)


def find_rotary(model: nn.Module, layer: AttentionLayer) -> Rotary | None:
    """The rotary embedding that rotates the queries of a layer: the nearest in the modules around it."""
    if layer.rope is False:
        return None
    kind = getattr(layer.module, "rope_layer_type", None) or layer.kind
    path = layer.path
    while True:
        for owner in _candidates(model.get_submodule(path), layer):
            for prefix in (f"{kind}_", ""):
                if isinstance(getattr(owner, f"{prefix}{_FACTOR}", None), (int, float)):
                    types = getattr(owner, "rope_type", "default")
                    own = types.get(kind, "default") if isinstance(types, dict) else types
                    frequencies = getattr(owner, f"{prefix}inv_freq", None)
                    dims = 2 * frequencies.numel() if isinstance(frequencies, Tensor) else 0
                    return Rotary(owner, f"{prefix}{_FACTOR}", str(own), dims)
        if not path:
            return None
        path = path.rpartition(".")[0]


def switch_off_rotary(model: nn.Module, layer: AttentionLayer, rotary: Rotary) -> Restore:
    """Let one layer rotate without the factor.

    Layers share what the embedding returns, so the factor is divided out in front of this one; once every layer does
    without, the embedding itself does, which costs nothing and rounds nothing.
    """
    if len(rotary.factors) > 1:
        return _same_for_every_length(rotary.owner)
    if not takes_argument(layer.module, _ARGUMENT):
        return set_attribute(rotary.owner, rotary.name, 1.0)
    before = getattr(rotary.owner, rotary.name)
    divide = functools.partial(_divided, rotary.owner, rotary.name)
    unhook = change_argument(layer.module, _ARGUMENT, divide)
    without = _without.setdefault(rotary.owner, {}).setdefault(rotary.name, weakref.WeakSet())
    without.add(layer.module)
    if all(user in without for user in _users(model, rotary)):
        setattr(rotary.owner, rotary.name, 1.0)

    return _FactorBack(layer.module, rotary, before, unhook)


def _candidates(parent: nn.Module, layer: AttentionLayer) -> Iterator[nn.Module]:
    """Rotary embeddings that a module holds, those for the base frequency of the layer first."""
    bases = getattr(getattr(layer.module, "config", None), "layer_rope_theta", None)
    for child in parent.children():
        if bases is not None and isinstance(child, nn.ModuleList):
            for inner in child:
                parameters = getattr(getattr(inner, "config", None), "rope_parameters", None) or {}
                if hasattr(inner, _FACTOR) and parameters.get("rope_theta") == bases[layer.layer]:
                    yield inner
    yield from parent.children()


def _users(model: nn.Module, rotary: Rotary) -> Iterator[nn.Module]:
    for layer in survey(model):
        theirs = find_rotary(model, layer)
        if theirs is not None and theirs.owner is rotary.owner and theirs.name == rotary.name:
            yield layer.module


def _divided(owner: nn.Module, name: str, rotation: Any) -> Any:
    """cos and sin, or the complex number that they are, without the factor."""
    factor = getattr(owner, name)
    if factor == 1.0 or rotation is None:
        return rotation
    return rotation / factor if isinstance(rotation, Tensor) else tuple(part / factor for part in rotation)


def _same_for_every_length(owner: nn.Module) -> Restore:
    """PhiMoE reads its factors from the configuration at each forward: give the embedding one that has none."""
    config: Any = copy.copy(owner.config)
    config.rope_parameters = {**config.rope_parameters, **dict.fromkeys(_BY_LENGTH, 1.0)}
    return set_attribute(owner, "config", config)
