"""`--to mistral`: a Ministral 3 checkpoint, whose temperature transformers, vLLM and SGLang apply without attnscale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Ministral3ForCausalLM

from attnscale.errors import ArgumentError
from attnscale.hf import Handle
from attnscale.serve.export.engine_form import EngineForm
from attnscale.serve.export.llama_family import build_ministral, engine_form, folded_weights, settings_of

DTYPE = None
CHECKED_DTYPE = None
CHECKED_LENGTHS = (512,)

_NAME = "mistral"
_LENGTH = "original_max_position_embeddings"


def plan(handle: Handle, path: str, tokenizer: Path | None) -> EngineForm:
    """Return the form of the policies; raise if the model or a policy cannot be exported exactly."""
    form = engine_form(handle, _NAME)
    model: Any = handle.model
    if form.coefficient > 1 and model.dtype == torch.float16:
        raise ArgumentError(
            f"dtype float16 of the model is not accepted by --to {_NAME} for {next(iter(handle.policies.values()))!r}: "
            f"q_proj is multiplied by {float(next(iter(form.factors.values()))[0]):.1e}, which underflows in float16; "
            "save the model in bfloat16 or float32"
        )
    rope = model.config.rope_parameters
    if rope["rope_type"] != "default" and rope.get(_LENGTH, form.length) != form.length:
        raise ArgumentError(
            f"rope_type={rope['rope_type']!r} with {_LENGTH}={rope[_LENGTH]} is not accepted by --to {_NAME}: "
            f"transformers reads the length {form.length} of the temperature from the same entry; use --to vllm or gguf"
        )
    return form


def write(handle: Handle, form: EngineForm, folder: Path) -> None:
    """Write config.json, generation_config.json and safetensors files."""
    model: Any = handle.model
    rope = {key: value for key, value in model.config.rope_parameters.items() if value is not None}
    exported = build_ministral(settings_of(model), rope, form, folded_weights(model, form))
    config: Any = exported.config
    # Each engine reads other entries: transformers those in rope_parameters, vLLM `llama_4_scaling`, SGLang
    # llama_4_scaling_beta in rope_parameters and the length at the top level.
    config.llama_4_scaling = {"beta": form.coefficient, _LENGTH: form.length}
    config.original_max_position_embeddings = form.length
    exported.generation_config = model.generation_config
    exported.save_pretrained(folder)


def read(handle: Handle, form: EngineForm, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the logits of the written model; raise if its config has another form."""
    source: Any = handle.model
    model: Any = Ministral3ForCausalLM.from_pretrained(folder, dtype=source.dtype)
    rope = model.config.rope_parameters
    form.check_read(rope["llama_4_scaling_beta"], rope[_LENGTH])
    model.eval()
    return lambda tokens: model(tokens, use_cache=False).logits
