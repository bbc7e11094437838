"""Warnings about policies that a pretrained model is unlikely to bear: nothing is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from attnscale.hf.survey import AttentionLayer, transformers_model
from attnscale.policies import LengthPolicy, Policy
from attnscale.policies.per_head import PerHead

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
    laws = [(layer, law) for layer in layers if layer.path in policies for law in _laws(policies[layer.path])]
    texts = []
    absolute = [(layer, law) for layer, law in laws if getattr(law, "reference_length", None) is None]
    sharp = [(beta, layer) for layer, law in absolute if (beta := _beta(law, layer, length)) >= SHARP]
    if sharp:
        beta, layer = max(sharp, key=_first)
        texts.append(
            f"attnscale: the logits of {_number(sharp)} layers of a pretrained model are multiplied by up to "
            f"{beta:.3g} (β at n = {min(length, layer.window or length)}); it was trained with 1. Anchor the law: "
            f"reference_length={length}, floor=True"
        )
    bounded = [(layer, law, max(length, layer.window)) for layer, law in laws if layer.window and not _learns(law)]
    soft = [(beta, layer) for layer, law, end in bounded if (beta := _beta(law, layer, end)) < SOFT]
    if soft:
        beta, layer = min(soft, key=_first)
        texts.append(
            f"attnscale: {_number(soft)} layers of a pretrained model see at most {layer.window} keys, where β stays "
            f"at {beta:.3g} or below however long the text: they are softened for good. floor=True keeps them at 1, "
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


def _laws(policy: Policy) -> list[LengthPolicy]:
    """The laws of length or position that a policy is, or gives its heads.

    A number that does not depend on the length is none: somebody chose it. Nor is what scores or queries decide.
    """
    modules = [policy] if not isinstance(policy, nn.Module) else list(policy.modules())
    found = [one for one in modules if isinstance(one, LengthPolicy) and not isinstance(one, PerHead)]
    return [one for one in found if one.uniform is None and not one.needs_query and not hasattr(one, "needs_scores")]


def _learns(policy: LengthPolicy) -> bool:
    return any(parameter.requires_grad for parameter in policy.parameters())


def _beta(policy: LengthPolicy, layer: AttentionLayer, length: int) -> float:
    """The largest β of a head at the end of a text of that length."""
    tensors = [*policy.parameters(), *policy.buffers()]
    position = torch.tensor([[[length - 1]]], device=tensors[0].device if tensors else None)
    with torch.no_grad():
        return float(policy((position + 1).clamp(max=layer.window or length), positions=position).max())


def _first(found: tuple[float, AttentionLayer]) -> float:
    return found[0]


def _number(found: Sequence[tuple[float, AttentionLayer]]) -> int:
    """How many layers, of which several heads may have been found."""
    return len({layer.path for _, layer in found})
