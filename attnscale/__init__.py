"""Scaled-dot-product attention with a temperature β(n), where n is the number of keys visible to each query.

>>> import torch, attnscale
>>> q = k = v = torch.randn(1, 8, 1024, 64)
>>> attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").shape
torch.Size([1, 8, 1024, 64])
"""

import importlib
from typing import TYPE_CHECKING, Any

from attnscale._util import state
from attnscale.attention import (
    attention_weights,
    attention_with_stats,
    explain_dispatch,
    scaled_dot_product_attention,
)
from attnscale.call.parse import visible_keys
from attnscale.convert import convert
from attnscale.doctor import doctor
from attnscale.errors import ArgumentError, ArgumentTypeError, AttnScaleError, AttnScaleWarning, BackendError
from attnscale.patch_torch import patch_torch
from attnscale.policies import LengthPolicy, Policy, QueryPolicy, build_policy, register_policy
from attnscale.softmax import SoftmaxOutput, softmax
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest, row_statistics
from attnscale.statistics.gaps import accumulation_scale

if TYPE_CHECKING:
    from attnscale.attention_loss import AttentionLoss
    from attnscale.diagnostics import Monitor, QKClip, observe
    from attnscale.module import MultiheadAttention, ScaledDotProductAttention

__version__ = "0.2.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionLoss",
    "AttentionOutput",
    "AttnScaleError",
    "AttnScaleWarning",
    "BackendError",
    "LengthPolicy",
    "Monitor",
    "MultiheadAttention",
    "Policy",
    "QKClip",
    "QueryPolicy",
    "RowStats",
    "ScaledDotProductAttention",
    "SoftmaxOutput",
    "StatsRequest",
    "accumulation_scale",
    "attention_weights",
    "attention_with_stats",
    "build_policy",
    "convert",
    "doctor",
    "explain_dispatch",
    "observe",
    "patch_torch",
    "register_policy",
    "row_statistics",
    "scaled_dot_product_attention",
    "softmax",
    "visible_keys",
]

# base-class module → package: a monitor imports the package for models of that kind. Diagnostics cannot import it
# directly, because `hf` is a higher layer.
state.MODEL_PACKAGES["transformers.modeling_utils"] = "attnscale.hf"

_LATER = {
    "AttentionLoss": "attnscale.attention_loss",
    "Monitor": "attnscale.diagnostics",
    "MultiheadAttention": "attnscale.module",
    "QKClip": "attnscale.diagnostics",
    "ScaledDotProductAttention": "attnscale.module",
    "observe": "attnscale.diagnostics",
}


def __getattr__(name: str) -> Any:
    """Lazy imports: `hf` needs transformers, the modules need einops, and most programs do not use a monitor."""
    if name in ("diagnostics", "distributed", "hf"):
        return importlib.import_module(f"attnscale.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'attnscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
