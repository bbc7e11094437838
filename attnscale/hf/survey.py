"""Where a transformers model attends, read from its modules without running it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import reject_type

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_CROSS = re.compile(r"cross|encdec|enc_dec|encoder_attn|encoder_decoder", re.IGNORECASE)
_SPARSE = re.compile(r"\b(?:block_|topk_)?indices=")


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention module. `layer` counts within its stack; `routed` says that it asks transformers' interface."""

    path: str
    module: nn.Module
    layer: int
    routed: bool
    cross: bool
    text: bool
    sparse: bool
    num_heads: int | None
    head_dim: int | None
    window: int | None
    softcap: float | None
    sinks: bool
    rope: bool | None

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration that names the implementation this module asks for."""
        return cast(PreTrainedConfig, self.module.config)


def survey(model: nn.Module) -> list[AttentionLayer]:
    """Every attention of a model, in the order of its modules: those with `routed` can be given a policy.

    A module counts as attention if its forward asks the interface, or if it is named so and holds projections.
    """
    unwrapped = transformers_model(model)
    found: list[AttentionLayer] = []
    counted: dict[str, int] = {}
    for path, module in model.named_modules():
        routed = asks_interface(type(module)) and hasattr(module, "config")
        if not routed and not _looks_like_attention(module):
            continue
        if not routed and any(path.startswith(f"{other.path}.") for other in found):
            continue  # a part of one that was found
        stack, number = _place(path)
        given = getattr(module, "layer_idx", None)
        layer = given if isinstance(given, int) else number if number is not None else counted.get(stack, 0)
        counted[stack] = layer + 1
        found.append(_read(path, module, layer, routed, _is_text(unwrapped, path, module)))
    return [layer for layer in found if layer.routed or not _holds_routed(layer.path, found)]


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, also from within a wrapper such as PEFT's or DDP's."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return module
    reject_type("model", model, "a transformers model, or a wrapper of one")


def asks_interface(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class looks its attention function up by name."""
    source = _source(kind.forward)
    return "ALL_ATTENTION_FUNCTIONS" in source or "attention_interface(" in source


@functools.cache
def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _looks_like_attention(module: nn.Module) -> bool:
    named = "attention" in type(module).__name__.lower()
    return named and sum(isinstance(child, nn.Linear) for child in module.children()) >= 2


def _holds_routed(path: str, found: list[AttentionLayer]) -> bool:
    return any(other.routed and other.path.startswith(f"{path}.") for other in found)


def _place(path: str) -> tuple[str, int | None]:
    """The stack that a path goes through, and its number there: "decoder.layers.3.self_attn" is number 3."""
    match = re.match(r"(.*?)\.?(\d+)\.(?!.*\.\d+\.)(.*)", path)
    if match is None:
        return path, None
    return f"{match[1]}.*.{match[3]}", int(match[2])


def _is_text(model: PreTrainedModel, path: str, module: nn.Module) -> bool:
    """Whether it belongs to the part that reads or writes text: all of it, in a model of one part."""
    config = getattr(module, "config", None)
    if getattr(model.config, "sub_configs", None):
        text = model.config.get_text_config()
        if text is not model.config:
            return type(config) is type(text)
    if model.main_input_name != "input_ids" and model.config.is_encoder_decoder:
        return ".encoder." not in f".{path}."
    return True


def _read(path: str, module: nn.Module, layer: int, routed: bool, text: bool) -> AttentionLayer:
    config = getattr(module, "config", None)
    heads = _first(module, config, _HEADS)
    head_dim = _first(module, None, ("qk_head_dim", "head_dim", "attention_head_size")) or _first(
        None, config, ("head_dim",)
    )
    if head_dim is None and heads and isinstance(getattr(config, "hidden_size", None), int):
        head_dim = config.hidden_size // heads  # type: ignore[union-attr]
    source = _source(type(module).forward)
    softcap = getattr(module, "attn_logit_softcapping", None) if "softcap=" in source else None
    use_rope = getattr(module, "use_rope", None)
    return AttentionLayer(
        path=path,
        module=module,
        layer=layer,
        routed=routed,
        cross=_is_cross(path, module),
        text=text,
        sparse=bool(_SPARSE.search(source)),
        num_heads=heads,
        head_dim=head_dim,
        window=_window(module, config, layer),
        softcap=softcap,
        sinks="s_aux=" in source,
        rope=bool(use_rope) if use_rope is not None else ("rotary" in source or "position_embeddings" in source),
    )


def _is_cross(path: str, module: nn.Module) -> bool:
    named = _CROSS.search(f"{path} {type(module).__name__}")
    return bool(getattr(module, "is_cross_attention", False)) or named is not None


def _first(module: nn.Module | None, config: Any, names: tuple[str, ...]) -> int | None:
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _window(module: nn.Module, config: Any, layer: int) -> int | None:
    """The sliding window or chunk of a layer, if it has one."""
    own = getattr(module, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer < len(kinds) else getattr(module, "layer_type", None)
    if kind == "full_attention" or getattr(module, "is_sliding", None) is False:
        return None
    if isinstance(own, int) and not isinstance(own, bool):
        return own
    if kind == "chunked_attention":
        return _first(None, config, ("attention_chunk_size",))
    return _first(None, config, ("sliding_window",)) if kind == "sliding_attention" else None
