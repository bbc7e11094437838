"""A stand-in for the parts of vLLM that the plugin uses: configs, registry, and a model with two attention layers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

HEADS, DIM, LENGTH = 4, 8, 256


class AttentionLayerBase:
    """Base class of vLLM's attention layers."""


class Attention(nn.Module, AttentionLayerBase):
    """Returns its queries, so that a test sees what attention would get."""

    def __init__(self, num_heads: int = HEADS, sliding_window: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_size, self.sliding_window = num_heads, DIM, sliding_window
        self.layer_name, self.attn_type = "layer", "decoder"
        self.query_quant: Any = None
        self.use_mm_prefix = False
        self.impl = SimpleNamespace(alibi_slopes=None)
        self.register_buffer("_k_scale", torch.ones(()))

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        return query


class MLAAttention(nn.Module, AttentionLayerBase):
    """An attention layer of another kind."""


class LlamaAttention(nn.Module):
    """A native attention module."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        return self.attn(hidden_states)


class GPT2Attention(nn.Module):
    """A native attention module that does not get positions."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.attn(hidden_states)


class LlamaForCausalLM(nn.Module):
    """A native model: layers at the paths of transformers, `Attention` one level below."""

    made: Any = staticmethod(lambda: LlamaAttention(Attention()))  # what a test wants as attention modules

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.model.layers:
            layer.self_attn = type(self).made()

    def forward(self, positions: Tensor, queries: Tensor) -> list[Tensor]:
        return [layer.self_attn(positions=positions, hidden_states=queries) for layer in self.model.layers]

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


class Base(nn.Module):
    """Base class of vLLM's transformers backend."""


class Registry:
    """vLLM's registry of model classes."""

    def __init__(self, kind: type[nn.Module] = LlamaForCausalLM) -> None:
        self.kind = kind

    def inspect_model_cls(self, architectures: Any, model_config: Any) -> tuple[str, str]:
        return "information", str(architectures)

    def resolve_model_cls(self, architectures: Any, model_config: Any) -> tuple[type[nn.Module], str]:
        return self.kind, "LlamaForCausalLM"


class Config(SimpleNamespace):
    """A config of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


class HFConfigParser:
    """vLLM's parser of config.json; `parsed` is what the file holds."""

    parsed: Any = None

    def parse(self, model: str) -> tuple[dict[str, Any], Config]:
        return dict(self.parsed), Config(**self.parsed)


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0", rank: int = 0, ranks: int = 1) -> None:
    """Put the stand-in into `sys.modules`, with unwrapped classes."""
    parts = {
        "vllm": {"__version__": version},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: rank,
            "get_tensor_model_parallel_world_size": lambda: ranks,
        },
        "vllm.model_executor.layers.attention": {"Attention": Attention},
        "vllm.model_executor.layers.attention_layer_base": {"AttentionLayerBase": AttentionLayerBase},
        "vllm.model_executor.models.registry": {"_ModelRegistry": type("_ModelRegistry", (Registry,), {})},
        "vllm.model_executor.models.transformers.base": {"Base": Base},
        "vllm.transformers_utils.config": {"HFConfigParser": type("HFConfigParser", (HFConfigParser,), {})},
    }
    for name in list(parts):
        for index, letter in enumerate(name):
            if letter == ".":
                parts.setdefault(name[:index], {})
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def model_config(record: Any = None, **changes: Any) -> SimpleNamespace:
    """Return a `ModelConfig` of vLLM."""
    text = Config(num_attention_heads=HEADS, head_dim=DIM, **({} if record is None else {"attnscale": record}))
    values = {"hf_config": text, "hf_text_config": text, "uses_mrope": False, "use_mla": False}
    return SimpleNamespace(**values | {"max_model_len": LENGTH, "dtype": torch.float32} | changes)


def vllm_config(config: Any, **parallel: int) -> SimpleNamespace:
    """Return a `VllmConfig`."""
    return SimpleNamespace(
        model_config=config, parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1} | parallel)
    )
