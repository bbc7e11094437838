"""Warnings about policies that probably harm a pretrained model. Nothing is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from attnscale.hf.attention_layers import AttentionLayer, transformers_model
from attnscale.hf.plan import beta_at_end
from attnscale.policies import LengthPolicy, Policy
from attnscale.policies.per_head import PerHead

# β from which logits count as multiplied: published systems reach 1.9, absolute laws have 2.5 to 80 at usual lengths.
SHARP = 2.0
# β below which a layer counts as softened; the rounding of f(n)/f(L) is far smaller.
SOFT = 0.99

# For models whose config does not say how long their texts were.
_USUAL_LENGTH = 2048


def find_cautions(model: nn.Module, layers: Sequence[AttentionLayer], policies: Mapping[str, Policy]) -> list[str]:
    """One text where policies multiply the logits of a pretrained model, one where its sliding layers stay softened."""
    if not _is_pretrained(model):
        return []
    length = getattr(transformers_model(model).config.get_text_config(), "max_position_embeddings", None)
    length = length if isinstance(length, int) and length > 1 else _USUAL_LENGTH
    laws = [(layer, law) for layer in layers if layer.path in policies for law in _laws(policies[layer.path])]
    texts = []
    absolute = [(layer, law) for layer, law in laws if getattr(law, "reference_length", None) is None]
    sharp = [(beta, layer) for layer, law in absolute if (beta := _beta(law, layer, length)) >= SHARP]
    if sharp:
        beta, layer = max(sharp, key=lambda found: found[0])
        number = len({layer.path for _, layer in sharp})  # each may be there once per head
        texts.append(
            f"attnscale: the logits of {number} layers of a pretrained model are multiplied by up to "
            f"{beta:.3g} (β at n = {min(length, layer.window or length)}); it was trained with 1. Anchor the law: "
            f"reference_length={length}, floor=True"
        )
    fixed = [(layer, law) for layer, law in laws if not any(p.requires_grad for p in law.parameters())]
    bounded = [(layer, law, max(length, layer.window)) for layer, law in fixed if layer.window]
    soft = [(beta, layer) for layer, law, end in bounded if (beta := _beta(law, layer, end)) < SOFT]
    if soft:
        beta, layer = min(soft, key=lambda found: found[0])
        number = len({layer.path for _, layer in soft})
        texts.append(
            f"attnscale: {number} layers of a pretrained model see at most {layer.window} keys, where β stays "
            f"at {beta:.3g} or below however long the text: they are softened for good. floor=True keeps them at 1, "
            "layers='full' leaves them out"
        )
    return texts


def _is_pretrained(model: nn.Module) -> bool:
    """Whether the weights were loaded by `from_pretrained`, and not trained with attnscale, which the config says.

    A random model with a loaded config has a `name_or_path` too; but transformers marks parameters read from a file.
    """
    inner = transformers_model(model)
    if not inner.config.name_or_path or getattr(inner.config, "attnscale", None) is not None:
        return False
    return any(getattr(parameter, "_is_hf_initialized", False) for parameter in inner.parameters())


def _laws(policy: Policy) -> list[LengthPolicy]:
    """The laws of length or position in a policy: itself, or those of its heads.

    Not constants, which somebody chose, nor policies that depend on scores or queries.
    """
    modules = [policy] if not isinstance(policy, nn.Module) else list(policy.modules())
    found = [one for one in modules if isinstance(one, LengthPolicy) and not isinstance(one, PerHead)]
    return [one for one in found if one.uniform is None and not one.needs_query and not hasattr(one, "needs_scores")]


def _beta(policy: LengthPolicy, layer: AttentionLayer, length: int) -> float:
    """The largest β of a head at the end of a text of that length."""
    return float(beta_at_end(policy, layer, [length]).max())
