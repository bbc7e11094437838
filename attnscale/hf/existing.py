"""Built-in length or position scaling of a model: detected per layer, named, and disabled on request.

Supported: YaRN, LongRoPE, Llama 4, Ministral 3, Mistral 4, Mistral Large 4, DeepSeek, Inkling and Beam.
`tests/hf/test_scaling_sources.py` reads the sources of the installed transformers for others.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, read_forward
from attnscale.hf.compatibility import why_fixed
from attnscale.hf.sites import Undo
from attnscale.policies import build_policy

_ROTARY = {"yarn": "YaRN", "longrope": "LongRoPE"}
_ROTATION = "position_embeddings"
_FACTOR = "attention_scaling"
_BY_LENGTH = ("short_mscale", "long_mscale")


@dataclass(frozen=True, eq=False)
class Existing:
    """A built-in factor on the logits of one layer; `switch_off()` returns the callback that restores it.

    `law` is the policy that gives the same factor, as plain data without learned values; None if there is none. `fixed`
    is the reason why the factor cannot be disabled, or None.
    """

    name: str
    effect: str
    switch_off: Callable[[], Undo]
    law: dict[str, Any] | None = None
    fixed: str | None = None

    @property
    def description(self) -> str:
        if self.law is None:
            return f"{self.name}: {self.effect}"
        fields = ", ".join(f"{key}={value!r}" for key, value in self.law.items() if key != "name")
        return f"{self.name}: {self.effect}; policy {self.law['name']}({fields})"


def find_existing(model: nn.Module, layer: AttentionLayer) -> list[Existing]:
    """Return every built-in length or position factor on the logits of a layer."""
    rotary = _find_rotary(model, layer)
    if rotary is None or all(factor == 1.0 for factor in rotary.factors):
        return list(_known_rules(layer))
    # cos and sin are multiplied by the factor, so q·k by its square.
    short, long = rotary.factors[0], rotary.factors[-1]
    if len(rotary.factors) > 1:
        effect = f"logits × {short**2:.4g} ({short:.4g}²) for short inputs, × {long**2:.4g} ({long:.4g}²) for long ones"
    else:
        effect = f"logits × {short**2:.4g} = attention_scaling² ({short:.4g}²)"
    law = None if len(rotary.factors) > 1 else _uniform_law(rotary.kind, rotary.parameters, short**2)
    if layer.head_dim and 0 < rotary.dims < layer.head_dim:
        effect += f" in {rotary.dims} of {layer.head_dim} dimensions"
        law = None
    switch_off = partial(_switch_off_rotary, model, layer, rotary)
    return [Existing(_ROTARY.get(rotary.kind, rotary.kind), effect, switch_off, law), *_known_rules(layer)]


def _known_rules(layer: AttentionLayer) -> Iterator[Existing]:
    """Yield the factors outside the rotary embedding, one rule per model family."""
    module: Any = layer.module
    parameters = _rope_parameters(module)
    # Multi-head latent attention folds YaRN's factor into the softmax scale.
    scaling, dims = getattr(module, "scaling", None), getattr(module, "qk_head_dim", None)
    if parameters.get("mscale_all_dim") and isinstance(scaling, float) and isinstance(dims, int):
        plain: float = dims**-0.5
        factor = scaling / plain
        if scaling != plain:
            effect = f"logits × {factor:.4g} = mscale² ({factor**0.5:.4g}²) in module.scaling"
            law = _uniform_law("deepseek", parameters, factor)
            yield Existing("DeepSeek mscale", effect, partial(_set_attribute, module, "scaling", plain), law)
    if getattr(module, "attn_temperature_tuning", False) and not layer.rope:
        effect = f"logits × 1 + {module.attn_scale:g}·ln(1 + ⌊(position + 1)/{module.floor_scale:g}⌋)"
        law = {"name": "llama4", "floor_length": int(module.floor_scale), "coefficient": float(module.attn_scale)}
        yield Existing("Llama 4", effect, partial(_set_attribute, module, "attn_temperature_tuning", False), law)
    # Ministral 3 and Mistral 4: Llama 4's rule, on every layer and without the + 1.
    beta = parameters.get("llama_4_scaling_beta")
    if beta and "llama_4_scaling_beta" in read_forward(module).text:
        floor = parameters.get("original_max_position_embeddings")
        effect = f"logits × 1 + {beta:g}·ln(1 + ⌊position/{floor}⌋)"
        law = {"name": "mistral", "floor_length": floor, "coefficient": float(beta)}
        # These modules use positions for nothing else, and the factor of position 0 is 1.
        switch_off = partial(_change_argument, module, "position_ids", torch.zeros_like)
        yield Existing("Mistral", effect, switch_off, law, why_fixed(module))
    learned = getattr(module, "softmax_scaling", None)
    # Untrained, the factor is 1.
    if learned is not None and (learned.scale.is_meta or learned.scale.any() or (learned.bias != 1).any()):
        effect = "logits × s·ln(position + 1) + b, both learned per head"
        law = {"name": "ssmax", "bias": True}
        yield Existing("Mistral Large 4", effect, partial(_return_first_argument, learned), law)
    floor = getattr(layer.config, "log_scaling_n_floor", None)
    if floor is not None and not getattr(module, "is_sliding", True):
        effect = f"logits × 1 + {layer.config.log_scaling_alpha:g}·ln max(1, (position + 1)/{floor:g})"
        law = {"name": "inkling", "floor_length": int(floor), "coefficient": float(layer.config.log_scaling_alpha)}
        # `forward` uses this attribute only to skip the scaling in sliding layers; that of Inkling 2 does not use it.
        fixed = None if "is_sliding" in read_forward(module).text else "attnscale cannot disable it in this model"
        yield Existing("Inkling", effect, partial(_set_attribute, module, "is_sliding", True), law, fixed)
    # Beam computes the factor once and passes it to its layers without rotary embedding.
    if not layer.rope and layer.routed and _takes_argument(module, _FACTOR):
        effect = "logits × (1 + (position + 1)/2048)^0.1"
        yield Existing("Beam", effect, partial(_change_argument, module, _FACTOR, _none), {"name": "beam"})


def _uniform_law(kind: str, parameters: dict[str, Any], factor: float) -> dict[str, Any] | None:
    """Return the policy yarn, longrope or deepseek with the settings of a config, if it gives this factor."""
    settings = {
        "yarn": {"factor": "factor"},
        "longrope": {"factor": "factor", "original_length": "original_max_position_embeddings"},
        "deepseek": {"factor": "factor", "mscale": "mscale_all_dim"},
    }.get(kind, {})
    law = {"name": kind} | {field: parameters.get(key) for field, key in settings.items()}
    if not settings or None in law.values():
        return None
    try:
        beta = build_policy(law).uniform
    except ArgumentError:  # settings that the policy does not accept
        return None
    return law if beta is not None and math.isclose(beta, factor, rel_tol=1e-6) else None


def _none(value: object) -> None:
    """Replace any value by None. A named function, since lambdas cannot be pickled."""


@dataclass(frozen=True, eq=False)
class _Rotary:
    """Rotary embedding of a layer: `name` is the attribute with its factor, `dims` the number of rotated dimensions."""

    owner: nn.Module
    name: str
    kind: str
    dims: int
    parameters: dict[str, Any]

    @property
    def factors(self) -> tuple[float, ...]:
        """The factor on cos and sin: one number, or two, for short and for long inputs."""
        if self.kind != "default" and "long_mscale" in read_forward(self.owner).text:
            return tuple(float(self.parameters[name]) for name in _BY_LENGTH)
        return (float(getattr(self.owner, self.name)),)


def _rope_parameters(module: nn.Module) -> dict[str, Any]:
    """Return `config.rope_parameters` of a module, or an empty dict."""
    given = getattr(getattr(module, "config", None), "rope_parameters", None)
    return given if isinstance(given, dict) else {}


def _find_rotary(model: nn.Module, layer: AttentionLayer) -> _Rotary | None:
    """Find the rotary embedding of a layer in the nearest enclosing module."""
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
                    parameters = _rope_parameters(owner)
                    parameters = parameters.get(str(kind), parameters) if isinstance(types, dict) else parameters
                    return _Rotary(owner, f"{prefix}{_FACTOR}", str(own), dims, parameters)
        if not path:
            return None
        path = path.rpartition(".")[0]


def _switch_off_rotary(model: nn.Module, layer: AttentionLayer, rotary: _Rotary) -> Undo:
    """Remove the rotary factor from one layer.

    Layers share the output of the embedding, so a pre-hook of this layer divides by the factor. Once all layers of the
    embedding have such a hook, the factor of the embedding itself is set to 1, without cost or rounding.
    """
    if len(rotary.factors) > 1:
        # PhiMoE reads its factors from the config in every forward pass: give the embedding a config without them.
        config: Any = copy.copy(rotary.owner.config)
        config.rope_parameters = {**config.rope_parameters, **dict.fromkeys(_BY_LENGTH, 1.0)}
        return _set_attribute(rotary.owner, "config", config)
    if not _takes_argument(layer.module, _ROTATION):
        return _set_attribute(rotary.owner, rotary.name, 1.0)
    factor = getattr(rotary.owner, rotary.name)
    unhook = _change_argument(layer.module, _ROTATION, partial(_without_factor, rotary.owner, rotary.name))
    if all(_does_without_factor(user) for user in _users(model, rotary)):
        setattr(rotary.owner, rotary.name, 1.0)
    return partial(_switch_on_rotary, rotary, factor, unhook)


def _switch_on_rotary(rotary: _Rotary, factor: float, unhook: Undo) -> None:
    unhook()
    setattr(rotary.owner, rotary.name, factor)


def _does_without_factor(module: nn.Module) -> bool:
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, partial)]
    return any(hook.func is _changed and hook.args[0] == _ROTATION for hook in hooks)


def _candidates(parent: nn.Module, layer: AttentionLayer) -> Iterator[nn.Module]:
    """Yield the children of a module that may be rotary embeddings, matches of the layer's base frequency first."""
    bases = getattr(layer.config, "layer_rope_theta", None)
    for child in parent.children():
        if bases is not None and isinstance(child, nn.ModuleList):
            for inner in child:
                if hasattr(inner, _FACTOR) and _rope_parameters(inner).get("rope_theta") == bases[layer.layer]:
                    yield inner
    yield from parent.children()


def _users(model: nn.Module, rotary: _Rotary) -> Iterator[nn.Module]:
    """Yield the attention modules that use a rotary embedding."""
    for layer in find_attention_layers(model):
        theirs = _find_rotary(model, layer)
        if theirs is not None and theirs.owner is rotary.owner and theirs.name == rotary.name:
            yield layer.module


def _without_factor(owner: nn.Module, name: str, rotation: Any) -> Any:
    """Divide (cos, sin), or one complex tensor, by the factor."""
    factor = getattr(owner, name)
    if factor == 1.0 or rotation is None:
        return rotation
    return rotation / factor if isinstance(rotation, Tensor) else tuple(part / factor for part in rotation)


# Each of the following changes a module and returns the callback that undoes the change. Modules hold a `partial`, not
# a closure: deep copies of the model then refer to the copied module.


def _set_attribute(owner: nn.Module, name: str, value: object) -> Undo:
    """Set an attribute of a module."""
    undo = partial(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
    return undo


def _takes_argument(module: nn.Module, name: str) -> bool:
    """Whether a module's `forward` has an argument of that name."""
    return name in inspect.signature(module.forward).parameters


def _change_argument(module: nn.Module, name: str, change: Callable[[Any], Any]) -> Undo:
    """Add a forward pre-hook that replaces the value of an argument by `change(value)`."""
    position = list(inspect.signature(module.forward).parameters).index(name)
    return module.register_forward_pre_hook(partial(_changed, name, position, change), with_kwargs=True).remove


def _return_first_argument(module: nn.Module) -> Undo:
    """Add a forward hook that makes a module return its first argument."""
    return module.register_forward_hook(_first_argument, with_kwargs=True).remove


def _changed(
    name: str,
    position: int,
    change: Callable[[Any], Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name in kwargs:
        return args, {**kwargs, name: change(kwargs[name])}
    if position < len(args):
        return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


def _first_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))
