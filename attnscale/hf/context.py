"""What limits the context of a model: the length it was trained at, and how its layers encode positions."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, read_forward, transformers_model

# Rotary embeddings of models that were trained at the stretched length, `max_position_embeddings`: Llama 3.1, Phi-3.
_TRAINED_STRETCHED = ("llama3", "longrope")

# Rotary embeddings that rotate as if there were no stretching. "proportional" rotates a part of the dimensions.
_PLAIN = ("default", "proportional")

# A table of positions may have a padding row, or two rows of offset as in BART and OPT.
_MOST_EXTRA_ROWS = 2

# Names of what adds positions to the input of a model: embed_positions, pos_encoding, pos_conv_embed, wpe.
_ADDED = re.compile(r"(^|_)pos(ition(s|al)?)?(_|$)|^wpe$")
_NOT_ADDED = re.compile(r"_ids$|^rel|rotary|rope")

NO_POSITIONS: Final = "no positional encoding"

_LENGTH = "max_position_embeddings"
ORIGINAL: Final = "original_max_position_embeddings"


class TrainedLength(NamedTuple):
    """The length at which a model was trained, and the entry of its config that says so."""

    tokens: int
    source: str


def find_trained_length(config: PreTrainedConfig) -> TrainedLength | None:
    """Return the length at which a model was trained, or None if the config does not name one.

    With a stretched rotary embedding, `max_position_embeddings` is the stretched length and
    `original_max_position_embeddings` the trained one.

    Example:
        >>> from transformers import LlamaConfig
        >>> rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
        >>> find_trained_length(LlamaConfig(max_position_embeddings=131072, rope_parameters=rope))
        TrainedLength(tokens=32768, source='original_max_position_embeddings')
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # some models have one entry per layer type
    known = [TrainedLength(longest_context(config) or 0, _LENGTH)]
    original = rope.get(ORIGINAL)
    if rope.get("rope_type") not in _TRAINED_STRETCHED and isinstance(original, int):
        known.append(TrainedLength(original, ORIGINAL))
    return min((length for length in known if length.tokens > 1), default=None)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return the tokens of `find_trained_length`."""
    found = find_trained_length(config)
    return None if found is None else found.tokens


def longest_context(config: PreTrainedConfig) -> int | None:
    """Return `max_position_embeddings`: the trained length, or the length to which the embedding is stretched."""
    longest = getattr(config.get_text_config(), _LENGTH, None)
    return longest if isinstance(longest, int) else None


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer. `factor` and `original_length` are None where the config has none."""

    kind: str
    factor: float | None = None
    original_length: int | None = None

    @property
    def stretched(self) -> bool:
        """Whether it rotates more slowly than in training at its base frequency."""
        return self.kind not in _PLAIN and self.factor != 1.0

    def __str__(self) -> str:
        if not self.stretched:
            return "RoPE, not stretched"
        factor = "" if self.factor is None else f" × {self.factor:g}"
        return f"RoPE, {self.kind}{factor}" + ("" if self.original_length is None else f" from {self.original_length}")


def rope_of(layer: AttentionLayer) -> Rope | None:
    """Return the rotary embedding of a layer according to its config; None if its queries are not rotated."""
    if not layer.rope:
        return None
    parameters = rope_parameters(layer.config, layer.kind)
    factor, original = parameters.get("factor"), parameters.get(ORIGINAL)
    return Rope(
        str(parameters.get("rope_type") or "default"),
        float(factor) if isinstance(factor, (int, float)) else None,
        original if isinstance(original, int) else None,
    )


def rope_parameters(config: Any, kind: str | None = None) -> dict[str, Any]:
    """Return the parameters of the rotary embedding for a kind of layer; empty if the config has none."""
    given = getattr(config, "rope_parameters", None)
    own = given.get(str(kind), given) if isinstance(given, dict) else None
    return own if isinstance(own, dict) else {}


def is_unstretched(layer: AttentionLayer, length: int) -> bool:
    """Whether a layer sees more than `length` tokens at once through a rotary embedding that is not stretched."""
    rope = rope_of(layer)
    return rope is not None and not rope.stretched and (layer.window is None or layer.window > length)


def position_table(model: nn.Module) -> int | None:
    """Return the number of positions of a table of learned or fixed position embeddings, or None without one.

    Such a model cannot read longer texts: later positions have no entry.
    """
    inner = transformers_model(model)
    limit, tokens = longest_context(inner.config), _token_tables(inner)
    if limit is None:  # its config names the length otherwise, as that of Whisper does
        added = [added_positions(inner, layer) for layer in find_attention_layers(inner) if layer.text]
        tables = [one for found in added for one in found.values() if isinstance(one, nn.Embedding)]
        return min((table.num_embeddings for table in tables), default=None)
    for module in inner.modules():
        rows = module.num_embeddings if isinstance(module, nn.Embedding) and module not in tokens else 0
        if limit <= rows <= limit + _MOST_EXTRA_ROWS:
            return limit
    return None


def _token_tables(model: nn.Module) -> set[nn.Module]:
    """Return the token embeddings of a model and of its parts, such as encoder and decoder."""
    found = set()
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        with contextlib.suppress(NotImplementedError):  # a part that reads no tokens, such as a speech encoder
            found.add(part.get_input_embeddings())
    return found


def positions_of(layer: AttentionLayer, model: nn.Module, table: int | None = None) -> str:
    """Describe how a layer of a model encodes positions; `table` is that of `position_table`."""
    inner, rope = transformers_model(model), rope_of(layer)
    if rope is not None:
        return str(rope)
    if _has_alibi(layer, inner.config):
        return "ALiBi"
    if has_position_bias(layer):
        return "relative position bias"
    if table is not None:
        return f"table of {table} positions"
    added = added_positions(inner, layer)
    return f"added to the input ({', '.join(added)})" if added else NO_POSITIONS


def added_positions(model: PreTrainedModel, layer: AttentionLayer) -> dict[str, object]:
    """Return the modules and tensors, by name, that add positions to the input of the encoder or decoder of a layer."""
    around = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and any(module is layer.module for module in part.modules())
    ]
    named: list[tuple[str, object]] = []
    for module in around[-1].modules():  # the innermost
        named += [
            *module.named_children(),
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]
        named += [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
    return {name: one for name, one in named if _ADDED.search(name) and not _NOT_ADDED.search(name)}


def has_position_bias(layer: AttentionLayer) -> bool:
    """Whether a layer adds a learned bias by distance to its scores, as T5 does."""
    passed = read_forward(layer.module).keywords
    return hasattr(layer.module, "has_relative_attention_bias") or "position_bias" in passed


def _has_alibi(layer: AttentionLayer, config: Any) -> bool:
    """Whether a layer adds a linear bias by distance to its scores, as Bloom, MPT and some Falcon models do."""
    inner = getattr(config, "attn_config", None)
    known = getattr(config, "alibi", getattr(inner, "alibi", None))
    return bool("alibi" in read_forward(layer.module).text if known is None else known)
