"""Next-token distributions of a GGUF file in llama.cpp, through the package xllamacpp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor


class LlamaCpp:
    """A GGUF file in llama.cpp on the CPU.

    Args:
        file: the GGUF file.
        context: the longest prompt, in tokens.
        exact: keep keys and values in fp32 and do not use flash attention; else the defaults, with keys in fp16.
    """

    def __init__(self, file: Path, context: int, exact: bool) -> None:
        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx = options.n_batch = context
        options.n_ubatch = 64  # prompts are prefilled in chunks
        options.n_parallel = 1
        options.n_gpu_layers = 0
        options.warmup = False
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = torch.get_num_threads()
        if exact:
            options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(options)

    def next_token(self, prompt: Sequence[int], vocabulary: int, visible: int) -> Tensor:
        """Return the log-probabilities [V] after a prompt. `visible` is a token whose text is valid UTF-8."""
        request: dict[str, Any] = {
            "prompt": list(prompt),
            "n_predict": 1,
            "n_probs": vocabulary,
            "cache_prompt": False,
            "logit_bias": [[visible, 1e9]],  # the answer has no probabilities for a token that is withheld
        }
        answer = self._server.handle_completions(request)
        found = torch.full((vocabulary,), torch.nan)
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found
