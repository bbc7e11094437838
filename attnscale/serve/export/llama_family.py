"""Llama and Mistral as Ministral 3, which stock engines serve with a temperature: factors are folded into q_proj."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Ministral3Config, Ministral3ForCausalLM, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf import Handle
from attnscale.hf.attention_layers import routed_layers
from attnscale.policies.record import is_of_policy
from attnscale.serve.export.engine_form import EngineForm, ServedLayer, fit_engine_form

# Model classes with the layers and weight names of Ministral 3.
_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")

# Settings of their configs that Ministral 3 does not have, and the value that leaves them out.
_ABSENT = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "quantization_config": None}

# Rotary embeddings with constant frequencies and without a temperature of their own.
_ROPE_TYPES = ("default", "linear", "llama3")


def engine_form(handle: Handle, engine: str) -> EngineForm:
    """Return the engine's form of the policies of a model.

    Args:
        handle: a loaded model with its policies.
        engine: the format, for error messages.

    Raises:
        ArgumentError: the model is not of the Llama family, or a policy has no exact form.
    """
    model: Any = handle.model
    name, config = type(model).__name__, model.config
    if name not in _CLASSES:
        raise ArgumentError(
            f"model class {name} is not accepted by --to {engine}: expected {' or '.join(_CLASSES)}, whose layers are "
            "those of Ministral 3; use --to vllm"
        )
    found = {key: getattr(config, key, value) for key, value in _ABSENT.items()}
    found["rope_type"] = config.rope_parameters["rope_type"]
    for key, value in found.items():
        accepted = _ROPE_TYPES if key == "rope_type" else (_ABSENT[key],)
        if value not in accepted:
            raise ArgumentError(
                f"{key}={value!r} in the config of the model is not accepted by --to {engine}: expected "
                f"{' or '.join(map(repr, accepted))}; use --to vllm"
            )
    layers = [
        ServedLayer(path, handle.policies.get(path), config.num_attention_heads, layer.window)
        for path, layer in routed_layers(model).items()
    ]
    return fit_engine_form(layers, config.max_position_embeddings, engine)


def folded_weights(model: PreTrainedModel, form: EngineForm, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the weights of a model with the factors of a form multiplied into the rows of q_proj, without policies.

    Args:
        model: a model of the Llama family.
        form: its form.
        dtype: dtype of q_proj in layers with a factor other than 1; by default that of the model.
    """
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items() if not is_of_policy(name)}
    for path, factor in form.factors.items():
        if bool((factor != 1).any()):
            name = f"{path}.q_proj.weight"
            weight = weights[name]
            rows = factor.repeat_interleave(weight.shape[0] // len(factor))[:, None]
            weights[name] = (weight.double() * rows).to(dtype or weight.dtype)
    return weights


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of a Llama or Mistral config that Ministral 3 has too, except for `rope_parameters`."""
    config: Any = model.config
    names = set(inspect.signature(Ministral3Config).parameters) - {"rope_parameters", "architectures", "kwargs"}
    return {key: value for key, value in config.to_dict().items() if key in names} | {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "sliding_window": getattr(config, "sliding_window", None),
    }


def build_ministral(
    settings: Mapping[str, Any], rope: Mapping[str, Any], form: EngineForm, weights: Mapping[str, Tensor]
) -> Any:
    """Return a Ministral 3 model in evaluation mode.

    Args:
        settings: entries of its config.
        rope: its `rope_parameters`, without the form.
        form: its temperature; the factors are ignored.
        weights: its weights, which are not copied.
    """
    temperature = {"llama_4_scaling_beta": form.coefficient, "original_max_position_embeddings": form.length}
    config = Ministral3Config(**settings, rope_parameters={**rope, **temperature})
    with torch.device("meta"):
        model: Any = Ministral3ForCausalLM(config)  # type: ignore[no-untyped-call]
    missing, unexpected = model.load_state_dict(dict(weights), strict=False, assign=True)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unexpected or set(missing) - set(tied):
        raise ArgumentError(f"weights {[*unexpected, *missing][:3]} do not fit Ministral 3")
    model.tie_weights()
    # The rotary embedding has buffers that are not in the weights.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def rotary_of(model: nn.Module) -> Any:
    """Return the rotary embedding of a model of the Llama family."""
    return model.get_submodule("model.rotary_emb")
