"""The tiny checkpoints that engines are compared on, and their log-probabilities in transformers with attnscale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from attnscale import hf

VOCABULARY = 96
REFERENCE_LENGTH = 32
LENGTHS = (16, 40, 100, 320)  # from half the reference length to ten times it
LAYERS, HEADS = 2, 4

STOCK = "stock"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def build_config(name: str) -> Any:
    """Return the config of a tiny model."""
    if name == "llama":
        return transformers.LlamaConfig(**_SHAPE)
    if name == "qwen3":
        return transformers.Qwen3Config(**_SHAPE)
    if name == "mistral":  # every layer has a window
        return transformers.MistralConfig(**_SHAPE, sliding_window=48)
    if name == "gemma3":  # the first layer has a window
        kinds = ["sliding_attention", "full_attention"]
        return transformers.Gemma3TextConfig(
            **_SHAPE,
            sliding_window=48,
            layer_types=kinds,
            query_pre_attn_scalar=32,
            hidden_activation="gelu_pytorch_tanh",
        )
    raise ValueError(name)


MODELS = ("llama", "qwen3", "mistral", "gemma3")

_LOG = {"name": "log", "reference_length": REFERENCE_LENGTH}
_SSMAX = {"name": "ssmax", "reference_length": REFERENCE_LENGTH}
_HEADS = {"default": {"name": "constant"}, "heads": {"0-1": _SSMAX, "3": {"name": "yarn", "factor": 4}}}

POLICIES: dict[str, Any] = {
    "log, floor": _LOG | {"floor": True},
    "log_squared": _LOG | {"name": "log_squared"},
    "sqrt_log": _LOG | {"name": "sqrt_log"},
    "ssmax, bias": _SSMAX | {"bias": True},
    "plan": {"default": _LOG | {"floor": True}, "layers": {"0": _HEADS}},
    "mistral": {"name": "mistral", "floor_length": REFERENCE_LENGTH, "coefficient": 0.3},
    "llama4": {"name": "llama4", "floor_length": REFERENCE_LENGTH, "coefficient": 0.3},
    "yarn": {"name": "yarn", "factor": 4},
    "qwen": {"name": "qwen", "reference_length": REFERENCE_LENGTH},
}


def build_model(name: str) -> Any:
    """Return a tiny model whose attention is sharp enough for a temperature to matter."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(build_config(name)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.06)
    return model


def write_checkpoints(name: str, folder: Path) -> None:
    """Save a model without a policy and with each policy, learned values moved from their initial ones."""
    model = build_model(name)
    model.save_pretrained(folder / STOCK)
    for policy, spec in POLICIES.items():
        with hf.apply(model, spec) as handle:
            for module in handle.policies.values():
                for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                    nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.05)
            model.save_pretrained(folder / policy)


def build_prompts(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model of a checkpoint in transformers, with its policy if it has one."""
    if folder.name == STOCK:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    return hf.load(folder, dtype=dtype).model.eval()


@torch.no_grad()
def log_probabilities(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return the next-token log-probabilities [T, V] of a sequence in fp32."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits
    return logits[0].float().log_softmax(-1)
