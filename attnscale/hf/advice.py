"""What to do with a model that cannot be swapped or heard: a sentence that fits it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from attnscale.errors import ArgumentTypeError
from attnscale.hf.survey import AttentionLayer, holds_transformers_model, transformers_model
from attnscale.policies import Policy

OWN_ATTENTION = "computes attention itself instead of asking transformers' interface"
CALL_OURS = "call attnscale.scaled_dot_product_attention in its forward"


def check_order(model: object, policy: object) -> None:
    """Refuse a model in the place of a policy, without printing it."""
    if isinstance(policy, nn.Module) and not isinstance(policy, Policy):
        kind = type(policy).__name__
        swapped = holds_transformers_model(policy) and not isinstance(model, nn.Module)
        hint = "; the model comes first, then the policy" if swapped else ""
        raise ArgumentTypeError(
            f"policy={kind} is not accepted: expected a name, a mapping, a YAML file or a policy{hint}"
        )


def few(paths: Sequence[str]) -> str:
    """The first path, and how many more there are."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def without_attention(model: nn.Module) -> str:
    """About a model in which no attention was found at all."""
    kind = type(transformers_model(model)).__name__
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        return f"model={kind} is not accepted: its attention is torch.nn.MultiheadAttention, for attnscale.convert"
    return (
        f"model={kind} is not accepted: it has no softmax attention, and so no logits to scale "
        "(state-space, recurrent and convolutional models have none)"
    )


def instead(refused: Sequence[AttentionLayer], every: Sequence[AttentionLayer]) -> str:
    """What to do about modules that compute attention themselves: leaving them out helps only if others remain."""
    if len(refused) < len(every):
        return f"leave it out with layers=..., or {CALL_OURS}"
    return f"no layer of this model asks it, so there is nothing for layers=... to select: {CALL_OURS}"


def instead_of_sparse(refused: Sequence[AttentionLayer], every: Sequence[AttentionLayer]) -> str:
    """What to do about modules whose keys an indexer picks."""
    if len(refused) < len(every):
        return "leave these layers out with layers=..."
    return "every layer of this model does, so a policy cannot be given to it"


def why_unheard(model: nn.Module, layers: Sequence[AttentionLayer]) -> str:
    """Why a monitor can hear nothing of a model that has no policy, and what to do."""
    if not layers:
        return without_attention(model)
    kind = type(transformers_model(model)).__name__
    routed = [layer for layer in layers if layer.routed and not layer.sparse]
    if not routed:
        what = "attends to keys that an indexer picks" if layers[0].routed else OWN_ATTENTION
        return (
            f"model={kind} is not accepted: {few([layer.path for layer in layers])} {what}; a monitor hears "
            "attention of attnscale's, such as an attnscale.ScaledDotProductAttention called in its forward"
        )
    names = " and ".join(sorted({repr(layer.config._attn_implementation) for layer in routed}))
    return (
        f"model={kind} is not accepted: a monitor cannot listen to attn_implementation={names}; call "
        "attnscale.hf.apply(model, 'constant') first, which is attention with β = 1, or load the model with "
        "attn_implementation='sdpa'"
    )
