"""A small transformers model with random weights for each model type, and inputs for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from hf_releases import skip_before, skip_without_type
from torch import Tensor, nn

import attnscale
import attnscale.hf

# 3-57: no special or image tokens.
TOKENS = torch.randint(3, 58, (2, 11), generator=torch.Generator().manual_seed(5))

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
} | _SPECIAL
_DECODER = _ENCODER | {"num_key_value_heads": 2}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | _SPECIAL
_HEAD = {"head_dim": 8}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
# Routers compute in fp32 and would hide the fp64 accuracy of attention: these types get dense layers only.
_DENSE = _EXPERTS | {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_dense_layers": 2,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_GEMMA = _HEAD | {"query_pre_attn_scalar": 8}
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4} | {
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
} | _SPECIAL
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
_SPEECH = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
}
_THREE_ROTARY_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}

# Each row: settings of the type in addition to those of its family.
_DECODERS: dict[str, dict[str, Any]] = {
    "afmoe": _DENSE | _HEAD | _WINDOW,
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "biogpt": {},
    "cohere": {},
    "cohere2": _WINDOW,
    "cwm": _HEAD | _WINDOW,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT | _DENSE,
    "deepseek_v3": _LATENT | _DENSE,
    "diffllama": {},
    "doge": {},
    "dots1": _DENSE | _HEAD,
    "ernie4_5": _HEAD,
    "exaone4": _HEAD | _WINDOW,
    "gemma": _HEAD,
    "gemma2": _GEMMA | _WINDOW | {"attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA | _WINDOW,
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": _DENSE | _HEAD,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": {},
    "gpt_oss": _EXPERTS | _HEAD | _WINDOW,
    "granite": {},
    "granite_swa": _WINDOW,
    "granitemoe": _EXPERTS,
    "helium": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": _EXPERTS
    | _HEAD
    | {
        "num_hidden_layers": 4,
        "floor_scale": 4,
        "moe_layers": [],
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 5,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "mimo_v2_flash": _EXPERTS | _HEAD | _WINDOW | {"mlp_layer_types": ["dense", "dense"]},
    "minicpm3": _LATENT,
    "minimax": _EXPERTS | _HEAD | {"layer_types": ["full_attention", "linear_attention"], "block_size": 4},
    "ministral": _HEAD | _WINDOW,
    "ministral3": _HEAD
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "mistral": _HEAD | {"sliding_window": 5},
    "mixtral": _EXPERTS,
    "modernbert-decoder": _WINDOW | {"local_attention": 5},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _EXPERTS,
    "qwen2": {},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": _HEAD,
    "qwen3_moe": _EXPERTS | _HEAD,
    "seed_oss": _HEAD,
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": _GEMMA | _WINDOW,
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "camembert": {},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "esm": {},
    "eurobert": {},
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    "nomic_bert": _HEAD,
    "roberta": {},
    "xlm-roberta": {},
}
_ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": _BART,
    "blenderbot": _BART,
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "mt5": _T5,
    "nllb-moe": _BART | {"num_experts": 4, "expert_capacity": 64},
    "pegasus": _BART,
    "plbart": _BART,
    "t5": _T5,
    "t5gemma": {"vocab_size": 64}
    | {part: _DECODER | _GEMMA | {"sliding_window": 5} for part in ("encoder", "decoder")},
    "umt5": _T5,
}
_MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _DECODER | _GEMMA | _WINDOW,
        "vision_config": _VISION,
        "mm_tokens_per_image": 9,
        "image_token_index": 60,
        "boi_token_index": 61,
        "eoi_token_index": 62,
    },
    "internvl": {
        "text_config": _DECODER | {"model_type": "qwen2"},
        "vision_config": _VISION | {"image_size": [12, 12], "patch_size": [4, 4]},
        "image_token_id": 60,
    },
    "llava": {
        "text_config": _DECODER | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
        "image_token_index": 60,
    },
    "mistral3": {
        "text_config": _DECODER | _HEAD | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral"},
        "image_token_index": 60,
        "spatial_merge_size": 1,
    },
    "qwen2_vl": {
        "text_config": _DECODER | _THREE_ROTARY_AXES,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4},
        "image_token_id": 60,
        "video_token_id": 61,
        "vision_start_token_id": 62,
        "vision_end_token_id": 63,
    },
}
_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip_text_model": ("AutoModel", _ENCODER),
    "clip_vision_model": ("AutoModel", _VISION),
    "dinov2": ("AutoModel", _VISION),
    "hubert": ("AutoModelForCTC", _SPEECH),
    "siglip_vision_model": ("AutoModel", _VISION),
    "vit": ("AutoModel", _VISION),
    "wav2vec2": ("AutoModelForCTC", _SPEECH),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {key: value for key, value in _BART.items() if key != "max_position_embeddings"}
        | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}

# Stock attention is eager for these types: torch's SDPA lacks softcap or sinks, or transformers does not offer it.
EAGER = frozenset({"gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash", "nllb-moe", "t5gemma", "vaultgemma"})

# Arguments of `apply`: half of MiniMax's layers are linear attention, and three types already scale by length.
_OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"on_existing": "compose"},
    "llama4_text": {"on_existing": "compose"},
    "minimax": {"layers": [0]},
    "ministral3": {"on_existing": "compose"},
}

# Non-attention parts of these types compute in fp32: complex rotations, the decay of linear attention.
_ROUNDS = frozenset({"deepseek_v2", "minimax"})

_ROUTED = "{} dispatches through AttentionInterface"
# First release in which a type can be tested, and what older ones lack.
_SINCE = {
    "dbrx": ("5.15", "DBRX models run with these settings"),
    "diffllama": ("5.13", _ROUTED),
    "modernbert": ("5.1", _ROUTED),
    "mt5": ("5.15", _ROUTED),
    "nemotron": ("5.13", _ROUTED),
    "t5": ("5.15", _ROUTED),
    "umt5": ("5.15", _ROUTED),
}


@dataclass(frozen=True)
class Species:
    """A model type: its auto class, its settings, and additional arguments of `apply`."""

    name: str
    family: str
    auto: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """Tolerance between the logits of a token computed in two ways."""
        return 1e-5 if self.name in _ROUNDS else 1e-9

    def build(self) -> nn.Module:
        """Build a model with fixed weights, in fp64 and evaluation mode."""
        return copy.deepcopy(_built(self.name))


def _species() -> dict[str, Species]:
    families = (
        ("decoder", "AutoModelForCausalLM", _DECODER, _DECODERS),
        ("encoder", "AutoModelForMaskedLM", _ENCODER, _ENCODERS),
        ("encoder-decoder", "AutoModelForSeq2SeqLM", {}, _ENCODER_DECODERS),
        ("multimodal", "AutoModelForImageTextToText", {}, _MULTIMODAL),
    )
    rows = [
        Species(
            name, family, auto, common | own, _OPTIONS.get(name, {"cross": True} if family == "encoder-decoder" else {})
        )
        for family, auto, common, table in families
        for name, own in table.items()
    ]
    rows += [
        Species(name, "tower", auto, settings, {"cross": True} if name == "whisper" else {})
        for name, (auto, settings) in _TOWERS.items()
    ]
    return {row.name: row for row in rows}


ZOO = _species()
WRITERS = [name for name, species in ZOO.items() if species.family in ("decoder", "multimodal")]
TRANSLATORS = [name for name, species in ZOO.items() if species.family == "encoder-decoder"]


@functools.cache
def _built(name: str) -> nn.Module:
    species = ZOO[name]
    skip_without_type(name)
    if name in _SINCE:
        release, what = _SINCE[name]
        skip_before(release, what.format(name))
    config = transformers.AutoConfig.for_model(name, **copy.deepcopy(dict(species.settings)))
    torch.manual_seed(0)
    # The other expert implementations do not support fp64.
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = getattr(transformers, species.auto).from_config(config, **options).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            # Large weights, so that attention is not flat. Parameters without a gradient are sinusoid tables.
            if parameter.requires_grad and (parameter.ndim > 1 or "sinks" in path):
                parameter.normal_(0, 0.3)
    return model


def reading(model: nn.Module) -> dict[str, Tensor]:
    """Inputs of two rows for any model: tokens, pixels, a waveform or a spectrogram."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    shapes = {"pixel_values": (2, 3, 12, 12), "input_values": (2, 64), "input_features": (2, 8, 20)}
    name = model.main_input_name
    inputs = {name: draw(shapes[name]) if name in shapes else TOKENS}
    return inputs | ({"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {})


def left_padding() -> dict[str, Tensor]:
    """A mask for `TOKENS` that hides the first four tokens of the second row."""
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    return {"attention_mask": mask}


def answer(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Logits [B, T, V], or the last hidden states if there are none, without gradients."""
    with torch.no_grad():
        output = model(**inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def apply_log(model: nn.Module) -> attnscale.hf.Handle:
    """Apply a temperature proportional to ln n, with β = 1 at four keys."""
    return attnscale.hf.apply(model, "log", reference_length=4, **ZOO[model.config.model_type].options)
