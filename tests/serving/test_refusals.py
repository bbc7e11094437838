"""What vLLM refuses, with the plugin and without it. Needs vLLM; run by `make test-serving`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attnscale import hf
from attnscale.policies.record import ARCHITECTURE_PREFIX
from scripts.serving.__main__ import ENVIRONMENT, OPTIONS
from scripts.serving.checkpoints import build_model

LOG = {"name": "log", "reference_length": 32, "floor": True}
START = """
import json, sys
from vllm import LLM
LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **json.loads(sys.argv[2]))
print("served")
"""


def start(folder: Path, environment: dict[str, str] | None = None, **options: Any) -> str:
    """Start an engine in a new process; return "served" or the last line of the error."""
    command = [sys.executable, "-c", START, str(folder), json.dumps(OPTIONS | options)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT, **(environment or {})}, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode == 0) == ("served" in done.stdout.splitlines())
    return "served" if done.returncode == 0 else done.stderr


def saved(model: Any, policy: Any, folder: Path) -> Path:
    with hf.apply(model, policy):
        model.save_pretrained(folder)
    return folder


def test_a_policy_that_reads_scores_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    error = start(saved(build_model("llama"), "entropy_adaptive", tmp_path))
    assert "LlamaForCausalLM" in error
    assert "it reads scores; serve the model with a length law" in error


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
    config = transformers.DeepseekV2Config(
        vocab_size=96, num_key_value_heads=4, first_k_dense_replace=2, n_routed_experts=4, **shape, **heads
    )
    torch.manual_seed(0)
    error = start(saved(transformers.DeepseekV2ForCausalLM(config), LOG, tmp_path))
    assert "DeepseekV2ForCausalLM" in error
    assert "(MLA)" in error


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("vllm", "GPT2Attention) does not receive positions; run it with transformers"),
        ("transformers", "has no module transformer.h.0.attn; run it with transformers"),
    ],
)
def test_attention_modules_without_a_known_place_for_beta_are_refused(
    backend: str, reason: str, tmp_path: Path
) -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=128, n_layer=2, n_head=4, n_positions=512)
    error = start(saved(transformers.GPT2LMHeadModel(config), LOG, tmp_path), model_impl=backend)
    assert reason in error


def test_without_the_plugin_the_exported_name_is_refused_and_with_it_served(tmp_path: Path) -> None:
    saved(build_model("llama"), LOG, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["architectures"] = [ARCHITECTURE_PREFIX + name for name in config["architectures"]]
    file.write_text(json.dumps(config), encoding="utf-8")
    assert start(tmp_path) == "served"
    assert "AttnscaleLlamaForCausalLM" in start(tmp_path, {"VLLM_PLUGINS": ""})
