"""A forward of a few tokens that proves which attention modules really call their site."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError
from attnscale.hf.attention_layers import AttentionLayer, transformers_model
from attnscale.hf.sites import site_of
from attnscale.policies.adaptive import assumed_estimates

Inputs = Mapping[str, Any]


def probe_sites(model: nn.Module, layers: list[AttentionLayer], inputs: Inputs | None = None) -> list[AttentionLayer]:
    """Run a model once and return those of the layers whose site was not called.

    In a model of several towers, layers that its main input does not reach are proven by a forward of their tower. The
    model and the random number generators stay as they are.
    """
    called: set[nn.Module] = set()
    sites = [site for layer in layers if (site := site_of(layer.module)) is not None]
    hooks = [site.register_forward_hook(lambda site, *_: called.add(site)) for site in sites]
    given = _inputs(model) if inputs is None else dict(inputs)
    try:
        failure = _run(model, given)
        parts = list(transformers_model(model).modules())[1:] if inputs is None else []
        for part in (module for module in parts if isinstance(module, PreTrainedModel)):
            if not called.issuperset(module for module in part.modules() if module in sites):
                _run(part, _inputs(part))  # a part that cannot run alone proves nothing, and is no failure
    finally:
        for hook in hooks:
            hook.remove()
    silent = [layer for layer, site in zip(layers, sites, strict=True) if site not in called]
    if failure is not None and (silent or inputs is not None):
        raise ArgumentError(
            f"the probe forward of {type(model).__name__} with {sorted(given)} failed: {failure!r}. Pass inputs that "
            "the model takes as probe={...}, or probe=False to go without the proof"
        ) from failure
    return silent


def _run(model: nn.Module, inputs: Inputs) -> Exception | None:
    """The exception of a forward in evaluation mode, if any; a refusal of attnscale itself is raised.

    Modes and random number generators are restored.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), assumed_estimates(model):
            model(**inputs)
    except ArgumentError:
        raise
    except Exception as error:
        return error
    finally:
        for module, training in modes:
            module.training = training
    return None


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Four tokens; or an image, waveform or spectrogram of zeros; or the model's own dummy inputs."""
    inner = transformers_model(model)
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    name, tokens = inner.main_input_name, torch.ones(1, 4, dtype=torch.int64, device="cpu")
    shape = _shape(inner.config, name)
    inputs: dict[str, Any]
    if name == "input_ids":
        inputs = {name: tokens}
    elif shape is not None:
        inputs = {name: torch.zeros(shape, device="cpu")}
    else:
        with torch.device("cpu"):
            inputs = dict(inner.dummy_inputs)
    if inner.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = tokens
    return {
        name: value.to(device, inner.dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }


def _shape(config: PreTrainedConfig, name: str) -> tuple[int, ...] | None:
    """The shape of an input that is not tokens, where the config says it."""
    size, stride, bins = (getattr(config, key, None) for key in ("image_size", "conv_stride", "num_mel_bins"))
    if name == "pixel_values" and size is not None:
        return 1, getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size)
    if name == "input_values" and stride is not None:
        return 1, 8 * math.prod(stride)
    if name == "input_features" and bins is not None and hasattr(config, "max_source_positions"):
        return 1, bins, 2 * config.max_source_positions
    return None
