"""`find_attention_layers` on small models of many families, without running them."""

from __future__ import annotations

import pytest
import torch
from hf_releases import models as hf
from hf_releases import skip_before
from tiny_models import llama
from transformers.models.llama.modeling_llama import LlamaAttention

from attnscale import ArgumentTypeError
from attnscale.hf.attention_layers import UNKNOWN, find_attention_layers, passed_keyword, rotates_queries

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
LATENT = SMALL | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
HYBRID = SMALL | {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "num_local_experts": 0,
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
HALF = {"num_heads": 2, "head_dim": 16}
SLIDING_FULL = ["sliding_attention", "full_attention"]


def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    return hf.Qwen2VLConfig(text_config=SMALL | {"num_key_value_heads": 2}, vision_config=vision)


def base(**changes):
    """The facts of an ordinary layer, with those that are different."""
    facts = {"routed": True, "cross": False, "text": True, "sparse": False, "window": None, "softcap": None}
    return facts | {"sinks": False, "rope": True, "num_heads": 4, "head_dim": 8} | changes


def stack(path, layers):
    """Facts by path and number, a layer each."""
    return {path.format(number): (number, facts) for number, facts in enumerate(layers)}


# The class, its configuration, and what is to be found in it.
FAMILIES = {
    "llama": (hf.LlamaModel, lambda: hf.LlamaConfig(**SMALL), stack("layers.{}.self_attn", [base()] * 2)),
    "qwen3": (
        hf.Qwen3Model,
        lambda: hf.Qwen3Config(**GROUPED),
        stack("layers.{}.self_attn", [base(head_dim=16)] * 2),
    ),
    "mistral": (
        hf.MistralModel,
        lambda: hf.MistralConfig(**SMALL, sliding_window=5),
        stack("layers.{}.self_attn", [base(window=5)] * 2),
    ),
    "mistral without a window": (
        hf.MistralModel,
        lambda: hf.MistralConfig(**SMALL, sliding_window=None),
        stack("layers.{}.self_attn", [base()] * 2),
    ),
    "gemma2": (
        hf.Gemma2Model,
        lambda: hf.Gemma2Config(**GROUPED, sliding_window=5, attn_logit_softcapping=30.0, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=w, softcap=30.0, head_dim=16) for w in (5, None)]),
    ),
    "gemma3": (
        hf.Gemma3TextModel,
        lambda: hf.Gemma3TextConfig(**GROUPED, sliding_window=5, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=w, head_dim=16) for w in (5, None)]),
    ),
    "gpt_oss": (
        hf.GptOssModel,
        lambda: hf.GptOssConfig(**GROUPED, sliding_window=5, num_local_experts=2, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=w, sinks=True, head_dim=16) for w in (5, None)]),
    ),
    "mimo_v2_flash: sinks in some layers": (
        hf.MiMoV2FlashModel,
        lambda: hf.MiMoV2FlashConfig(**GROUPED, sliding_window=5, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=5, sinks=True, head_dim=16), base(head_dim=16)]),
    ),
    "granite_swa: base frequencies by layer": (
        hf.GraniteSWAModel,
        lambda: hf.GraniteSWAConfig(**SMALL, sliding_window=5, layer_types=SLIDING_FULL, layer_rope_theta=[1e4, 0.0]),
        stack("layers.{}.self_attn", [base(window=5, sinks=True), base(sinks=True, rope=False)]),
    ),
    "llama4": (
        hf.Llama4TextModel,
        lambda: hf.Llama4TextConfig(**GROUPED, attention_chunk_size=6, no_rope_layers=[1, 0], moe_layers=[]),
        stack("layers.{}.self_attn", [base(window=6, head_dim=16), base(rope=False, head_dim=16)]),
    ),
    "smollm3": (
        hf.SmolLM3Model,
        lambda: hf.SmolLM3Config(**SMALL, num_key_value_heads=2, no_rope_layers=[1, 0]),
        stack("layers.{}.self_attn", [base(), base(rope=False)]),
    ),
    "cohere2: rotation in sliding layers": (
        hf.Cohere2Model,
        lambda: hf.Cohere2Config(**SMALL, sliding_window=5, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=5), base(rope=False)]),
    ),
    "exaone4: rotation in sliding layers": (
        hf.Exaone4Model,
        lambda: hf.Exaone4Config(**SMALL, sliding_window=5, layer_types=SLIDING_FULL),
        stack("layers.{}.self_attn", [base(window=5), base(rope=False)]),
    ),
    "beam: rotation as the model decides": (
        hf.BeamModel,
        lambda: hf.BeamConfig(**GROUPED, sliding_window=5, layer_types=SLIDING_FULL, mlp_layer_types=["dense"] * 2),
        stack("layers.{}.self_attn", [base(window=5, head_dim=16), base(rope=False, head_dim=16)]),
    ),
    "gpt2": (
        hf.GPT2Model,
        lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
        stack("h.{}.attn", [base(rope=False)] * 2),
    ),
    "gpt2 with cross attention": (
        hf.GPT2Model,
        lambda: hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True),
        stack("h.{}.attn", [base(rope=False)] * 2) | stack("h.{}.crossattention", [base(rope=False, cross=True)] * 2),
    ),
    "bert": (
        hf.BertModel,
        lambda: hf.BertConfig(**SMALL),
        stack("encoder.layer.{}.attention.self", [base(rope=False)] * 2),
    ),
    "t5": (
        hf.T5Model,
        lambda: hf.T5Config(vocab_size=64, d_model=32, d_kv=6, d_ff=48, num_layers=2, num_heads=4),
        stack("encoder.block.{}.layer.0.SelfAttention", [base(rope=False, head_dim=6)] * 2)
        | stack("decoder.block.{}.layer.0.SelfAttention", [base(rope=False, head_dim=6)] * 2)
        | stack("decoder.block.{}.layer.1.EncDecAttention", [base(rope=False, head_dim=6, cross=True)] * 2),
    ),
    "bart": (
        hf.BartModel,
        lambda: hf.BartConfig(**BART),
        stack("encoder.layers.{}.self_attn", [base(rope=False)] * 2)
        | stack("decoder.layers.{}.self_attn", [base(rope=False)] * 2)
        | stack("decoder.layers.{}.encoder_attn", [base(rope=False, cross=True)] * 2),
    ),
    "whisper": (
        hf.WhisperModel,
        lambda: hf.WhisperConfig(**BART, num_mel_bins=8, max_source_positions=16),
        stack("encoder.layers.{}.self_attn", [base(rope=False, text=False)] * 2)
        | stack("decoder.layers.{}.self_attn", [base(rope=False)] * 2)
        | stack("decoder.layers.{}.encoder_attn", [base(rope=False, cross=True)] * 2),
    ),
    "clip": (
        hf.CLIPModel,
        lambda: hf.CLIPConfig(text_config=SMALL, vision_config=TOWER),
        stack("text_model.encoder.layers.{}.self_attn", [base(rope=False)] * 2)
        | stack("vision_model.encoder.layers.{}.self_attn", [base(rope=False, text=False, **HALF)] * 2),
    ),
    "qwen2_vl": (
        hf.Qwen2VLModel,
        qwen2_vl,
        stack("visual.blocks.{}.attn", [base(text=False, **HALF)] * 2)
        | stack("language_model.layers.{}.self_attn", [base()] * 2),
    ),
    "llava": (
        hf.LlavaModel,
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**SMALL),
            vision_config=hf.CLIPVisionConfig(**TOWER),
        ),
        stack("vision_tower.encoder.layers.{}.self_attn", [base(rope=False, text=False, **HALF)] * 2)
        | stack("language_model.layers.{}.self_attn", [base()] * 2),
    ),
    "swin: blocks in stages": (
        hf.SwinModel,
        lambda: hf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=2),
        {
            "encoder.layers.0.blocks.0.attention": (0, base(rope=False, num_heads=2, head_dim=4)),
            "encoder.layers.0.blocks.1.attention": (1, base(rope=False, num_heads=2, head_dim=4)),
            "encoder.layers.1.blocks.0.attention": (2, base(rope=False, num_heads=4, head_dim=4)),
        },
    ),
    "deepseek_v3": (
        hf.DeepseekV3Model,
        lambda: hf.DeepseekV3Config(**LATENT, first_k_dense_replace=2),
        stack("layers.{}.self_attn", [base(head_dim=12)] * 2),
    ),
    "deepseek_v32": (
        hf.DeepseekV32Model,
        lambda: hf.DeepseekV32Config(
            **LATENT, first_k_dense_replace=2, index_topk=4, index_n_heads=2, index_head_dim=16
        ),
        stack("layers.{}.self_attn", [base(head_dim=12, sparse=True)] * 2),
    ),
    "minimax_m3: an indexer in some layers": (
        hf.MiniMaxM3VLTextModel,
        lambda: hf.MiniMaxM3VLTextConfig(**GROUPED, layer_types=["full_attention", "minimax_m3_sparse"]),
        stack("layers.{}.self_attn", [base(head_dim=16), base(head_dim=16, sparse=True)]),
    ),
    "deepseek_v4: compressed keys in some layers": (
        hf.DeepseekV4Model,
        lambda: hf.DeepseekV4Config(
            **SMALL,
            head_dim=16,
            q_lora_rank=16,
            o_groups=2,
            o_lora_rank=8,
            sliding_window=5,
            n_routed_experts=2,
            layer_types=["sliding_attention", "compressed_sparse_attention"],
        ),
        stack("layers.{}.self_attn", [base(head_dim=16, sinks=True, window=5, sparse=s) for s in (False, True)]),
    ),
    "t5gemma2: an encoder of text and pictures": (
        hf.T5Gemma2Model,
        lambda: hf.T5Gemma2Config(
            encoder={
                "text_config": GROUPED | {"sliding_window": 5, "layer_types": SLIDING_FULL},
                "vision_config": TOWER,
            },
            decoder=GROUPED | {"sliding_window": 5, "layer_types": SLIDING_FULL},
        ),
        stack("encoder.text_model.layers.{}.self_attn", [base(window=w, head_dim=16) for w in (5, None)])
        | stack("encoder.vision_tower.encoder.layers.{}.self_attn", [base(rope=False, text=False, **HALF)] * 2)
        | stack("decoder.layers.{}.self_attn", [base(window=w, head_dim=16) for w in (5, None)]),
    ),
    "a picture encoder and a text decoder": (
        hf.VisionEncoderDecoderModel,
        lambda: hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            hf.ViTConfig(**TOWER), hf.BertConfig(**SMALL)
        ),
        stack("encoder.layers.{}.attention", [base(rope=False, text=False, **HALF)] * 2)
        | stack("decoder.bert.encoder.layer.{}.attention.self", [base(rope=False)] * 2)
        | stack("decoder.bert.encoder.layer.{}.crossattention.self", [base(rope=False, cross=True)] * 2),
    ),
    "zamba2: one attention in several places": (
        hf.Zamba2Model,
        lambda: hf.Zamba2Config(
            **SMALL, layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, mamba_expand=2, n_mamba_heads=8
        ),
        {"layers.1.shared_transformer.self_attn": (1, base(rope=False, head_dim=16))},
    ),
    "longcat_flash: two attentions in a layer": (
        hf.LongcatFlashModel,
        lambda: hf.LongcatFlashConfig(
            **LATENT,
            num_layers=1,
            ffn_hidden_size=32,
            expert_ffn_hidden_size=16,
            n_routed_experts=2,
            zero_expert_num=1,
            moe_topk=1,
        ),
        {f"layers.0.self_attn.{number}": (number, base(head_dim=12)) for number in range(2)},
    ),
    "granitemoehybrid: no positions at all": (
        hf.GraniteMoeHybridModel,
        lambda: hf.GraniteMoeHybridConfig(**HYBRID, position_embedding_type="nope"),
        {"layers.1.self_attn": (1, base(rope=False))},
    ),
    "granitemoehybrid with rotation": (
        hf.GraniteMoeHybridModel,
        lambda: hf.GraniteMoeHybridConfig(**HYBRID, position_embedding_type="rope"),
        {"layers.1.self_attn": (1, base())},
    ),
    "an encoder and a decoder of text": (
        hf.EncoderDecoderModel,
        lambda: hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**SMALL), hf.BertConfig(**SMALL)),
        stack("encoder.encoder.layer.{}.attention.self", [base(rope=False)] * 2)
        | stack("decoder.bert.encoder.layer.{}.attention.self", [base(rope=False)] * 2)
        | stack("decoder.bert.encoder.layer.{}.crossattention.self", [base(rope=False, cross=True)] * 2),
    ),
    "qwen3_next: linear attention is none": (
        hf.Qwen3NextModel,
        lambda: hf.Qwen3NextConfig(
            **GROUPED,
            layer_types=["linear_attention", "full_attention"],
            num_experts=0,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        {"layers.1.self_attn": (1, base(head_dim=16))},
    ),
    "minimax: lightning attention is none": (
        hf.MiniMaxModel,
        lambda: hf.MiniMaxConfig(
            **GROUPED, layer_types=["linear_attention", "full_attention"], num_local_experts=2, block_size=4
        ),
        {"layers.1.self_attn": (1, base(head_dim=16))},
    ),
    "bloom": (
        hf.BloomModel,
        lambda: hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        stack("h.{}.self_attention", [base(routed=False, rope=False)] * 2),
    ),
    "gptj": (
        hf.GPTJModel,
        lambda: hf.GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        stack("h.{}.attn", [base(routed=False)] * 2),
    ),
    "falcon": (
        hf.FalconModel,
        lambda: hf.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        stack("h.{}.self_attention", [base(routed=False)] * 2),
    ),
    "xlnet: projections without modules": (
        hf.XLNetModel,
        lambda: hf.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=32),
        stack("layer.{}.rel_attn", [base(routed=False, rope=False)] * 2),
    ),
}


RENAMED = "the modules of this model have these paths"
SINCE = {
    "t5": ("5.15", "T5 dispatches through AttentionInterface"),
    "llava": ("5.6", RENAMED),
    "t5gemma2: an encoder of text and pictures": ("5.6", RENAMED),
    "swin: blocks in stages": ("5.9", RENAMED),
    "a picture encoder and a text decoder": ("5.9", RENAMED),
}


def build(family):
    if family in SINCE:
        skip_before(*SINCE[family])
    kind, config, _ = FAMILIES[family]
    with torch.device("meta"):
        return kind(config())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_is_found_and_read_rightly(family):
    found = {}
    for layer in find_attention_layers(build(family)):
        found[layer.path] = (layer.layer, {name: getattr(layer, name) for name in base()})
    assert found == FAMILIES[family][2]


def test_layers_keep_their_numbers_and_facts_inside_a_wrapper():
    wrapped = torch.nn.Sequential(torch.nn.Identity(), llama(num_hidden_layers=3))
    assert [(layer.path, layer.layer) for layer in find_attention_layers(wrapped)] == [
        (f"1.model.layers.{number}.self_attn", number) for number in range(3)
    ]


def test_a_model_without_attention_has_none():
    with torch.device("meta"):
        mamba = hf.MambaModel(hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    assert find_attention_layers(mamba) == []


def test_another_kind_of_model_is_refused():
    with pytest.raises(ArgumentTypeError, match="transformers model"):
        find_attention_layers(torch.nn.Linear(2, 2))


class Decided(LlamaAttention):
    """Its forward, never run, leaves some things to the module and some to its arguments."""

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        if self.first and not self.second:
            apply_rotary(hidden_states)  # noqa: F821
        elif position_embeddings is not None:
            apply_rope(hidden_states)  # noqa: F821
        return attention_interface(  # noqa: F821
            self, softcap=self.cap if self.first else None, s_aux=hidden_states, **kwargs
        )


@pytest.mark.parametrize(
    ("first", "second", "rotated", "cap"),
    [(True, False, True, 7.0), (True, True, None, 7.0), (False, False, None, None)],
)
def test_the_source_is_asked_of_the_module(first, second, rotated, cap):
    module = Decided(hf.LlamaConfig(**SMALL), 0)
    module.first, module.second, module.cap = first, second, 7.0
    assert rotates_queries(module) is rotated
    assert passed_keyword(module, "softcap") == cap
    assert passed_keyword(module, "s_aux") is UNKNOWN
    assert passed_keyword(module, "sliding_window") is None
