"""Scaling by length or position that a model has of its own: YaRN, LongRoPE, Llama 4, Mistral, DeepSeek and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnscale.hf.attention_layers import AttentionLayer
from attnscale.hf.forward_source import read_forward
from attnscale.hf.reversible import Undo, change_argument, return_first_argument, set_attribute, takes_argument
from attnscale.hf.rotary import find_rotary, rope_parameters, switch_off_rotary

_ROTARY = {"yarn": "YaRN", "longrope": "LongRoPE"}


@dataclass(frozen=True, eq=False)
class Existing:
    """A factor on the logits of one layer that the model applies itself; `switch_off()` returns what undoes it."""

    name: str
    description: str
    switch_off: Callable[[], Undo]


def find_existing(model: nn.Module, layer: AttentionLayer) -> list[Existing]:
    """Every factor by length or position that the model applies to the logits of a layer."""
    found = (find(model, layer) for find in _FINDERS)
    return [existing for existing in found if existing is not None]


def _rotary(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    """cos and sin are multiplied by a factor, so q·k by its square."""
    rotary = find_rotary(model, layer)
    if rotary is None or all(factor == 1.0 for factor in rotary.factors):
        return None
    name = _ROTARY.get(rotary.kind, rotary.kind)
    short, long = rotary.factors[0], rotary.factors[-1]
    if len(rotary.factors) > 1:
        sizes = f"logits × {short**2:.4g} ({short:.4g}²) for short inputs, × {long**2:.4g} ({long:.4g}²) for long ones"
    else:
        sizes = f"logits × {short**2:.4g} = attention_scaling² ({short:.4g}²)"
    if layer.head_dim and 0 < rotary.dims < layer.head_dim:
        sizes += f" in {rotary.dims} of {layer.head_dim} dimensions"
    return Existing(name, f"{name}: {sizes}", partial(switch_off_rotary, model, layer, rotary))


def _mscale(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    """Multi-head latent attention puts YaRN's factor into the scale of the softmax."""
    module, parameters = layer.module, rope_parameters(layer.module)
    scaling, dims = getattr(module, "scaling", None), getattr(module, "qk_head_dim", None)
    if not parameters.get("mscale_all_dim") or not isinstance(scaling, float) or not isinstance(dims, int):
        return None
    plain: float = dims**-0.5
    if scaling == plain:
        return None
    factor = scaling / plain
    text = f"DeepSeek mscale: logits × {factor:.4g} = mscale² ({factor**0.5:.4g}²) in module.scaling"
    return Existing("DeepSeek mscale", text, partial(set_attribute, module, "scaling", plain))


def _llama4(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    module: Any = layer.module
    if not getattr(module, "attn_temperature_tuning", False) or layer.rope:
        return None
    text = f"Llama 4: logits × 1 + {module.attn_scale:g}·ln(1 + ⌊(position + 1)/{module.floor_scale:g}⌋)"
    return Existing("Llama 4", text, partial(set_attribute, module, "attn_temperature_tuning", False))


def _ministral(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    """Ministral 3 and Mistral 4: Llama 4's rule, on every layer and without the + 1."""
    parameters = rope_parameters(layer.module)
    beta = parameters.get("llama_4_scaling_beta")
    if not beta or "llama_4_scaling_beta" not in read_forward(type(layer.module)).text:
        return None
    length = parameters.get("original_max_position_embeddings")
    text = f"Mistral: logits × 1 + {beta:g}·ln(1 + ⌊position/{length}⌋)"
    # These modules use positions for nothing else, and the factor of position 0 is 1.
    return Existing("Mistral", text, partial(change_argument, layer.module, "position_ids", torch.zeros_like))


def _mistral_large(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    learned: Any = getattr(layer.module, "softmax_scaling", None)
    if learned is None or _is_one(learned.scale, learned.bias):
        return None
    text = "Mistral Large 4: logits × s·ln(position + 1) + b, both learned per head"
    return Existing("Mistral Large 4", text, partial(return_first_argument, learned))


def _inkling(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    module, config = layer.module, getattr(layer.module, "config", None)
    floor = getattr(config, "log_scaling_n_floor", None)
    if floor is None or getattr(module, "is_sliding", True):
        return None
    text = f"Inkling: logits × 1 + {config.log_scaling_alpha:g}·ln max(1, (position + 1)/{floor:g})"  # type: ignore[union-attr]
    # The forward uses this attribute only to leave sliding layers unscaled.
    return Existing("Inkling", text, partial(set_attribute, module, "is_sliding", True))


def _beam(model: nn.Module, layer: AttentionLayer) -> Existing | None:
    """The model computes the factor once and passes it to its layers without rotary embedding."""
    if layer.rope or not layer.routed or not takes_argument(layer.module, "attention_scaling"):
        return None
    text = "Beam: logits × (1 + (position + 1)/2048)^0.1"
    return Existing("Beam", text, partial(change_argument, layer.module, "attention_scaling", _none))


_FINDERS = (_rotary, _mscale, _llama4, _ministral, _mistral_large, _inkling, _beam)


def _is_one(scale: Tensor, bias: Tensor) -> bool:
    """Whether s·ln(position + 1) + b is 1 at every position, its initial value."""
    return not scale.is_meta and not bool(scale.any()) and bool((bias == 1).all())


def _none(value: object) -> None:
    """None in place of any value; a function because a lambda cannot be pickled."""
