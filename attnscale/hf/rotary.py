"""The factor that a rotary embedding puts on queries and keys: where it is, and how to switch it off."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from attnscale._util import state
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers
from attnscale.hf.forward_source import read_forward
from attnscale.hf.reversible import Undo, change_argument, set_attribute, takes_argument

_ARGUMENT = "position_embeddings"
_FACTOR = "attention_scaling"
_BY_LENGTH = ("short_mscale", "long_mscale")


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of a layer: `name` is the attribute that holds its factor, `dims` how many it rotates."""

    owner: nn.Module
    name: str
    kind: str
    dims: int

    @property
    def factors(self) -> tuple[float, ...]:
        """What cos and sin are multiplied by: one number, or one for short and one for long inputs."""
        parameters = rope_parameters(self.owner)
        if self.kind != "default" and "long_mscale" in read_forward(type(self.owner)).text:
            return tuple(float(parameters[name]) for name in _BY_LENGTH)
        return (float(getattr(self.owner, self.name)),)


def rope_parameters(module: nn.Module) -> dict[str, Any]:
    """`config.rope_parameters` of a module; empty where it has none."""
    given = getattr(getattr(module, "config", None), "rope_parameters", None)
    return given if isinstance(given, dict) else {}


def find_rotary(model: nn.Module, layer: AttentionLayer) -> Rotary | None:
    """The rotary embedding of a layer: the nearest one in the modules around it."""
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


def switch_off_rotary(model: nn.Module, layer: AttentionLayer, rotary: Rotary) -> Undo:
    """Let one layer rotate without the factor.

    Layers share the output of the embedding, so the factor is divided out in front of this layer. Once all of its
    layers do without, the factor of the embedding itself is set to 1, which costs nothing and rounds nothing.
    """
    if len(rotary.factors) > 1:
        # PhiMoE reads its factors from the config at each forward: give the embedding a config without them.
        config: Any = copy.copy(rotary.owner.config)
        config.rope_parameters = {**config.rope_parameters, **dict.fromkeys(_BY_LENGTH, 1.0)}
        return set_attribute(rotary.owner, "config", config)
    if not takes_argument(layer.module, _ARGUMENT):
        return set_attribute(rotary.owner, rotary.name, 1.0)
    factor = getattr(rotary.owner, rotary.name)
    unhook = change_argument(layer.module, _ARGUMENT, partial(_without_factor, rotary.owner, rotary.name))
    switched_off = _switched_off(rotary)
    switched_off.add(layer.module)
    if all(user in switched_off for user in _users(model, rotary)):
        setattr(rotary.owner, rotary.name, 1.0)
    return partial(_switch_on, layer.module, rotary, factor, unhook)


def _switch_on(module: nn.Module, rotary: Rotary, factor: float, unhook: Undo) -> None:
    """Undo `switch_off_rotary`."""
    unhook()
    _switched_off(rotary).discard(module)
    setattr(rotary.owner, rotary.name, factor)


def _switched_off(rotary: Rotary) -> weakref.WeakSet[nn.Module]:
    """The attention modules that do without the factor of an embedding."""
    modules: weakref.WeakSet[nn.Module] = state.HF_ROTARY_USERS.setdefault(rotary.owner, {}).setdefault(
        rotary.name, weakref.WeakSet()
    )
    return modules


def _candidates(parent: nn.Module, layer: AttentionLayer) -> Iterator[nn.Module]:
    """Rotary embeddings that a module may hold, those for the base frequency of the layer first."""
    bases = getattr(getattr(layer.module, "config", None), "layer_rope_theta", None)
    for child in parent.children():
        if bases is not None and isinstance(child, nn.ModuleList):
            for inner in child:
                if hasattr(inner, _FACTOR) and rope_parameters(inner).get("rope_theta") == bases[layer.layer]:
                    yield inner
    yield from parent.children()


def _users(model: nn.Module, rotary: Rotary) -> Iterator[nn.Module]:
    """The attention modules that rotate by an embedding."""
    for layer in find_attention_layers(model):
        theirs = find_rotary(model, layer)
        if theirs is not None and theirs.owner is rotary.owner and theirs.name == rotary.name:
            yield layer.module


def _without_factor(owner: nn.Module, name: str, rotation: Any) -> Any:
    """cos and sin, or one complex tensor of both, divided by the factor."""
    factor = getattr(owner, name)
    if factor == 1.0 or rotation is None:
        return rotation
    return rotation / factor if isinstance(rotation, Tensor) else tuple(part / factor for part in rotation)
