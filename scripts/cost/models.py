"""Cost of a policy in a transformers model: prefill and one decode step, relative to stock sdpa."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attnscale._util.optional import need
from attnscale.bench.rows import Quartiles, Row
from scripts.cost.measuring import in_both_roles, interleaved_ratio, label

# Layer shapes of SmolLM2-135M. Prefill uses fewer layers, as it would take minutes.
SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LAYERS = {"prefill": 6, "decode": 30}


@dataclass(frozen=True)
class ModelCost:
    """A prefill of `length` tokens, or a decode step after them, with a length law relative to without."""

    mode: str
    length: int
    rounds: int
    padded: bool = False

    def measure(self) -> list[Row]:
        transformers = need("transformers", "this benchmark", "hf")
        hf = need("attnscale.hf", "this benchmark", "hf")
        config = {**SHAPE, "num_hidden_layers": LAYERS[self.mode], "max_position_embeddings": 2 * self.length}
        torch.manual_seed(0)
        one, other = (transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval() for _ in range(2))
        other.load_state_dict(one.state_dict(), assign=True)
        step = prefill if self.mode == "prefill" else decode

        def measured(swapped: Any, stock: Any) -> Quartiles:
            with hf.apply(swapped, "log", reference_length=2048):
                ours, theirs = (step(transformers, model, self.length, self.padded) for model in (swapped, stock))
                return interleaved_ratio(ours, theirs, self.rounds)

        ratio = in_both_roles(measured, one, other)
        name = "log_padded" if self.padded else "log"
        return [Row("transformers", name, self.mode, "time_ratio", self.length, *ratio, *label(9, 64))]


def prefill(transformers: Any, model: Any, length: int, padded: bool) -> Callable[[], object]:
    """A forward pass over all tokens; logits of the last one only."""
    inputs = _inputs(length, length, padded)

    def step() -> None:
        with torch.no_grad():
            model(**inputs, use_cache=False, logits_to_keep=1)

    return step


def decode(transformers: Any, model: Any, length: int, padded: bool) -> Callable[[], object]:
    """A forward pass of one token after a cache of random keys and values."""
    cache = transformers.DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(length)
    for layer in range(model.config.num_hidden_layers):
        keys, values = (torch.randn(1, 3, length, 64, generator=generator, device=generator.device) for _ in range(2))
        cache.update(keys, values, layer)
    inputs = _inputs(1, length + 1, padded)

    def step() -> None:
        with torch.no_grad():
            model(**inputs, past_key_values=cache)
        cache.crop(-1)

    return step


def _inputs(tokens: int, keys: int, padded: bool) -> dict[str, Any]:
    """Tokens and, if padded, a mask that hides the first ten keys."""
    mask = torch.ones(1, keys, dtype=torch.int64, device="cpu")
    mask[:, :10] = 0
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": torch.randint(SHAPE["vocab_size"], (1, tokens), generator=generator, device=generator.device)
    }
    return inputs | ({"attention_mask": mask} if padded else {})
