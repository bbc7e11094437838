"""Warnings about policies that a pretrained model is unlikely to bear: nothing is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from attnscale.hf.survey import AttentionLayer, transformers_model
from attnscale.policies import Policy

# Published systems reach 1.9 at the longest text; an absolute law has 2.5 to 80 at usual lengths.
SHARP = 2.0
# Below this a layer is called softened: rounding of f(n)/f(L) is far smaller.
SOFT = 0.99

# For models that do not say how long their texts were.
_USUAL_LENGTH = 2048


def find_cautions(model: nn.Module, layers: Sequence[AttentionLayer], policies: Mapping[str, Policy]) -> list[str]:
    """A sentence where policies multiply the logits of a pretrained model, or soften its sliding layers for good."""
    if not is_pretrained(model):
        return []
    length = trained_length(model)
    given = [(layer, policies[layer.path]) for layer in layers if layer.path in policies]
    texts = []
    sharp = [(beta, layer) for layer, policy in given if (beta := _beta(policy, layer, length)) and beta >= SHARP]
    if sharp:
        beta, layer = max(sharp, key=lambda found: found[0])
        texts.append(
            f"attnscale: the logits of {len(sharp)} layers of a pretrained model are multiplied by up to {beta:.3g} "
            f"(β at n = {min(length, layer.window or length)}); it was trained with 1. Anchor the law: "
            f"reference_length={length}, floor=True"
        )
    soft = [
        (beta, layer)
        for layer, policy in given
        if layer.window is not None
        and not _learns(policy)
        and (beta := _beta(policy, layer, max(length, layer.window))) is not None
        and beta < SOFT
    ]
    if soft:
        beta, layer = min(soft, key=lambda found: found[0])
        texts.append(
            f"attnscale: {len(soft)} layers of a pretrained model see at most {layer.window} keys, where β stays at "
            f"{beta:.3g} or below however long the text: they are softened for good. floor=True keeps them at 1, "
            "layers='full' leaves them out"
        )
    return texts


def is_pretrained(model: nn.Module) -> bool:
    """Whether the weights of a model were loaded by `from_pretrained` rather than drawn at random.

    A config that was loaded has a `name_or_path` too, so the parameters are asked: transformers marks those it has
    read from a file. What was trained with attnscale says so in its config, and is not warned about.
    """
    inner = transformers_model(model)
    if not inner.config.name_or_path or getattr(inner.config, "attnscale", None) is not None:
        return False
    return any(getattr(parameter, "_is_hf_initialized", False) for parameter in inner.parameters())


def trained_length(model: nn.Module) -> int:
    """How long the texts of a model are at most, as its config says."""
    config = transformers_model(model).config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 1 else _USUAL_LENGTH


def _learns(policy: Policy) -> bool:
    return isinstance(policy, nn.Module) and any(parameter.requires_grad for parameter in policy.parameters())


def _beta(policy: Policy, layer: AttentionLayer, length: int) -> float | None:
    """The largest β of a head at the end of a text of that length.

    None where scores or queries decide, and for a number that does not depend on the length: somebody chose it.
    """
    if getattr(policy, "needs_scores", False) or policy.needs_query or policy.uniform is not None:
        return None
    tensors = [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []
    position = torch.tensor([[[length - 1]]], device=tensors[0].device if tensors else None)
    with torch.no_grad():
        return float(policy((position + 1).clamp(max=layer.window or length), positions=position).max())
