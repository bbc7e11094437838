"""Small checkpoints with policies, and folders for their exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import tokenizers
import torch
import transformers

from attnscale import hf

Saved = Callable[..., Path]

VOCABULARY = 257  # all bytes, and one merge


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A function that saves a model with a policy, and a tokenizer; learned scales differ between heads."""

    def save(policy: Any, kind: Any = tiny_models.llama, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
        settings = {"max_position_embeddings": 1024, "vocab_size": VOCABULARY} | settings
        model = kind(**settings).to(dtype)
        folder = tmp_path / "model"
        with hf.apply(model, policy) as handle:
            for parameter in handle.parameters():
                parameter.data += torch.linspace(0.5, 1.5, len(parameter)).reshape(-1, *[1] * (parameter.dim() - 1)) / 8
            model.save_pretrained(folder)
        byte_pairs().save_pretrained(folder)
        return folder

    return save


def byte_pairs() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with a single merge, which splits text as GPT-2 does."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    model = tokenizers.models.BPE(vocab=vocabulary | {"ab": 256}, merges=[("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!")
