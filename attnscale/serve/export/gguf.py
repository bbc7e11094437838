"""`--to gguf`: a file of the architecture `mistral3` for llama.cpp, which applies the temperature itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from attnscale._util.optional import need
from attnscale.errors import ArgumentError
from attnscale.hf import Handle
from attnscale.hf.checkpoint import StoredFiles
from attnscale.serve.export.engine_form import EngineForm
from attnscale.serve.export.gguf_tokenizer import Tokenizer, converted_tokenizer, copied_tokenizer
from attnscale.serve.export.llama_family import build_ministral, engine_form, folded_weights, rotary_of, settings_of

DTYPE = None
CHECKED_DTYPE = torch.float32  # llama.cpp has fp32 activations
CHECKED_LENGTHS = (512,)

_NAME = "gguf"
_ARCHITECTURE = "mistral3"
_FILE = "model.gguf"
_FREQUENCIES = "rope_freqs.weight"

# Weight of a layer in transformers → in GGUF.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

# Setting of a Ministral 3 config → key in GGUF, without the architecture.
_SETTINGS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_TEMPERATURE = f"{_ARCHITECTURE}.attention.temperature_scale"
_LENGTH = f"{_ARCHITECTURE}.rope.scaling.original_context_length"
_BASE = f"{_ARCHITECTURE}.rope.freq_base"


class GgufPlan(NamedTuple):
    """The temperature of a model in llama.cpp, and its tokenizer."""

    form: EngineForm
    tokenizer: Tokenizer


def plan(handle: Handle, path: str, tokenizer: Path | None) -> GgufPlan:
    """Return temperature and tokenizer; raise if the model, a policy or the tokenizer cannot be exported exactly."""
    need("gguf", "attnscale export --to gguf", "export")
    form = engine_form(handle, _NAME)
    model: Any = handle.model
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        raise ArgumentError(
            f"sliding_window={window} in the config of the model is not accepted by --to {_NAME}: llama.cpp computes "
            f"{_ARCHITECTURE} with full attention; use --to mistral or vllm"
        )
    if tokenizer is not None:
        return GgufPlan(form, copied_tokenizer(tokenizer, model.config.vocab_size))
    return GgufPlan(form, converted_tokenizer(StoredFiles(path, {}), model.config.vocab_size))


def write(handle: Handle, planned: GgufPlan, folder: Path) -> None:
    """Write one GGUF file. Matrices keep their dtype; scaled rows of q are stored in fp32, norms always are."""
    gguf = need("gguf", "attnscale export --to gguf", "export")
    model: Any = handle.model
    settings, form = settings_of(model), planned.form
    writer = gguf.GGUFWriter(folder / _FILE, _ARCHITECTURE)
    for setting, key in _SETTINGS.items():
        value = settings[setting]
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{_ARCHITECTURE}.{key}", value)
    writer.add_value_length(settings["head_dim"])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_float32(_BASE, _base(model))
    if form.coefficient != 0.0:
        writer.add_float32(_TEMPERATURE, form.coefficient)
        writer.add_uint32(_LENGTH, form.length)
    writer.add_file_type(_file_type(gguf, model.dtype))
    planned.tokenizer.write(writer)
    frequencies = _frequency_factors(model, settings["head_dim"])
    if frequencies is not None:
        writer.add_tensor(_FREQUENCIES, frequencies.numpy())
    for name, weight in folded_weights(model, form, torch.float32).items():
        if name == "lm_head.weight" and settings["tie_word_embeddings"]:
            continue
        weight = _interleaved(weight, _heads(name, settings))
        kind = _tensor_type(gguf, weight.dtype if weight.dim() > 1 else torch.float32)
        data = gguf.quants.quantize(weight.float().contiguous().numpy(), kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(handle: Handle, planned: GgufPlan, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the logits of a Ministral 3 model built from the written file; raise if it has another temperature."""
    gguf = need("gguf", "attnscale export --to gguf", "export")
    file = gguf.GGUFReader(folder / _FILE)
    fields = {key: field.contents() for key, field in file.fields.items() if key.startswith(_ARCHITECTURE)}
    coefficient = fields.get(_TEMPERATURE, 0.0)
    length = fields.get(_LENGTH, planned.form.length)
    planned.form.check_read(coefficient, length)
    source: Any = handle.model
    settings = {setting: fields[f"{_ARCHITECTURE}.{key}"] for setting, key in _SETTINGS.items()}
    names = {_gguf_name(name): name for name in source.state_dict() if name.endswith(".weight")}
    weights: dict[str, Tensor] = {}
    factors = None
    for tensor in file.tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name == _FREQUENCIES:
            factors = value
        else:
            name = names[tensor.name]
            weights[name] = _halves(value, _heads(name, settings))
    settings |= {"tie_word_embeddings": "lm_head.weight" not in weights, "pad_token_id": None}
    rope = {"rope_type": "default", "rope_theta": fields[_BASE]}
    form = EngineForm(coefficient, length, {}, 0.0)
    model: Any = build_ministral(settings, rope, form, weights)
    if factors is not None:
        rotary_of(model).inv_freq /= factors
    return lambda tokens: model(tokens, use_cache=False).logits


def _gguf_name(name: str) -> str:
    """Return the name of a weight in GGUF.

    >>> _gguf_name("model.layers.3.self_attn.q_proj.weight"), _gguf_name("model.norm.weight")
    ('blk.3.attn_q.weight', 'output_norm.weight')
    """
    stem = name.removesuffix(".weight")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.weight"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_LAYER[part]}.weight"


def _heads(name: str, settings: Mapping[str, Any]) -> int | None:
    """Return the number of heads of a weight whose rows are rotated; None for other weights."""
    if name.endswith(".q_proj.weight"):
        return int(settings["num_attention_heads"])
    return int(settings["num_key_value_heads"]) if name.endswith(".k_proj.weight") else None


def _interleaved(weight: Tensor, heads: int | None) -> Tensor:
    """Return rows [H·D, …] with the two halves of each head interleaved: llama.cpp rotates neighbouring rows."""
    if heads is None:
        return weight
    return rearrange(weight, "(head half pair) ... -> (head pair half) ...", head=heads, half=2)


def _halves(weight: Tensor, heads: int | None) -> Tensor:
    """Inverse of `_interleaved`."""
    if heads is None:
        return weight
    return rearrange(weight, "(head pair half) ... -> (head half pair) ...", head=heads, half=2)


def _base(model: Any) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def _frequency_factors(model: Any, head_dim: int) -> Tensor | None:
    """Return the divisors [D/2] of the rotary frequencies, for the rope types llama3 and linear; None if all are 1."""
    plain = _base(model) ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    factors = (plain / rotary_of(model).inv_freq.double().cpu()).float()
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=1e-6) else factors


def _tensor_type(gguf: Any, dtype: torch.dtype) -> Any:
    types = {torch.bfloat16: gguf.GGMLQuantizationType.BF16, torch.float16: gguf.GGMLQuantizationType.F16}
    return types.get(dtype, gguf.GGMLQuantizationType.F32)


def _file_type(gguf: Any, dtype: torch.dtype) -> Any:
    types = {torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16, torch.float16: gguf.LlamaFileType.MOSTLY_F16}
    return types.get(dtype, gguf.LlamaFileType.ALL_F32)
