"""Small transformers models with random weights in fp64, and tokens for them."""

from __future__ import annotations

import tokenizers
import torch
import transformers
from hf_releases import models, skip_before

TOKENS = torch.randint(1, 64, (2, 11), generator=torch.Generator().manual_seed(5))

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large, so that attention is not flat
    "pad_token_id": 0,
}


def build(kind, config):
    """Build a model with fixed random weights, in fp64 and evaluation mode."""
    torch.manual_seed(0)
    return kind(config).double().eval()


def llama(**settings):
    """Two layers, four heads in two groups."""
    return build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**(_SMALL | settings)))


def mistral(**settings):
    """With a sliding window of five keys."""
    settings = {"sliding_window": 5, "head_dim": 8} | settings
    return build(transformers.MistralForCausalLM, transformers.MistralConfig(**(_SMALL | settings)))


def ministral(**settings):
    """With a sliding window of five keys in some of the layers."""
    settings = {"sliding_window": 5, "head_dim": 8} | settings
    return build(transformers.MinistralForCausalLM, transformers.MinistralConfig(**(_SMALL | settings)))


def t5():
    """An encoder and a decoder with relative position bias."""
    skip_before("5.15", "T5 dispatches through AttentionInterface")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
    )
    return build(transformers.T5ForConditionalGeneration, config)


def bloom():
    """A model that computes attention itself."""
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    return build(transformers.BloomForCausalLM, config)


def deepseek_sparse():
    """A model whose indexer selects the keys."""
    config = models.DeepseekV32Config(
        **_SMALL,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        moe_intermediate_size=16,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
    )
    return build(models.DeepseekV32ForCausalLM, config)


def logits(model, tokens=TOKENS, **inputs):
    """The logits of the tokens."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            inputs.setdefault("decoder_input_ids", tokens)
        return model(input_ids=tokens, **inputs).logits


def train(model, folder, steps, resume=None, callbacks=None):
    """A Trainer after some steps, with a checkpoint after every second one."""
    data = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(4, 1)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def byte_tokenizer():
    """One token for each of the 256 bytes; only the end of text is special."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    end = "Ā"  # byte 0, which occurs in no text
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=end, pad_token=end)
