"""What to do with a model whose attention cannot be swapped or heard: a sentence that fits it."""

from __future__ import annotations

from collections.abc import Sequence

from attnscale.hf.survey import AttentionLayer

NO_ATTENTION = "it has no attention whose logits a temperature could scale (a state-space or convolutional model?)"


def few(paths: Sequence[str]) -> str:
    """The first path, and how many more there are."""
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def instead_of_own_attention(every: Sequence[AttentionLayer], refused: Sequence[AttentionLayer]) -> str:
    """What to do about modules that compute attention themselves: leaving them out helps only if some remain."""
    call = "call attnscale.scaled_dot_product_attention(..., policy=...) in its forward"
    if len(refused) < len(every):
        return f"leave it out with layers=..., or {call}"
    return f"no layer of this model asks, so that layers=... cannot help: {call}"


def why_unlistened(layers: Sequence[AttentionLayer]) -> str:
    """Why a monitor hears nothing of a model that has no policy, and what to do."""
    if not layers:
        return NO_ATTENTION
    routed = [layer for layer in layers if layer.routed and not layer.sparse]
    if not routed:
        kind = "attends to keys that an indexer picks" if any(layer.sparse for layer in layers) else (
            "computes attention itself instead of asking transformers' interface"
        )
        return (
            f"{few([layer.path for layer in layers])} {kind}; a monitor hears modules that call "
            "attnscale.ScaledDotProductAttention"
        )
    names = sorted({str(layer.config._attn_implementation) for layer in routed})
    return (
        f"its attention is computed by {' and '.join(map(repr, names))}, where a monitor cannot listen; give it to "
        "attnscale with attnscale.hf.apply(model, 'constant'), which is β = 1, or load the model with "
        "attn_implementation='sdpa'"
    )
