"""Runs checkpoints in vLLM and saves its log-probabilities. Does not import attnscale: the plugin is on its own.

python -m scripts.serving.vllm_engine JOB.json
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

GENERATED = 8


def main() -> None:
    """Run the job of a JSON file: engine options, prompts, and checkpoints with the files for their outputs."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    gc.freeze()  # vLLM collects garbage eight times for each engine
    for checkpoint, output in job["runs"]:
        torch.save(run(checkpoint, job["prompts"], job["options"], job["adapter"]), output)


def run(checkpoint: str, prompts: list[list[int]], options: dict[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return the distributions of an engine: [T − 1, V] or [0, V] for a prompt, and [8, V] for its generated tokens.

    All prompts run concurrently and in chunks. Generation follows in a second call, from the prefix cache.
    """
    vocabulary = options["max_logprobs"]
    engine = LLM(checkpoint, skip_tokenizer_init=True, **options)
    # vLLM's CPU build fails for log-probabilities of prompts with an adapter.
    wanted = vocabulary if adapter is None else None
    request = {} if adapter is None else {"lora_request": LoRARequest("adapter", 1, adapter)}
    texts = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling: dict[str, Any] = {"temperature": 0.0, "detokenize": False, "ignore_eos": True}
    first = engine.generate(
        texts, SamplingParams(max_tokens=1, prompt_logprobs=wanted, **sampling), use_tqdm=False, **request
    )
    second = engine.generate(
        texts, SamplingParams(max_tokens=GENERATED, logprobs=vocabulary, **sampling), use_tqdm=False, **request
    )
    result = {
        "prompts": [dense((output.prompt_logprobs or [None])[1:], vocabulary) for output in first],
        "generated": [dense(output.outputs[0].logprobs, vocabulary) for output in second],
        "tokens": [list(output.outputs[0].token_ids) for output in second],
        "cached": [output.num_cached_tokens for output in second],
    }
    del engine
    gc.collect()
    gc.freeze()
    return result


def dense(rows: Any, vocabulary: int) -> Tensor:
    """Return vLLM's log-probabilities, one mapping for each row, as [T, V]."""
    return torch.tensor([[row[token].logprob for token in range(vocabulary)] for row in rows]).reshape(-1, vocabulary)


if __name__ == "__main__":
    main()
