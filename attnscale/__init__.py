"""Attention whose temperature knows how many keys each query sees.

>>> import torch, attnscale
>>> q = k = v = torch.randn(1, 8, 1024, 64)
>>> attnscale.scaled_dot_product_attention(q, k, v, is_causal=True, policy="log").shape
torch.Size([1, 8, 1024, 64])
"""

from attnscale.attention import attention_weights, explain_dispatch, scaled_dot_product_attention
from attnscale.convert import convert
from attnscale.doctor import doctor
from attnscale.errors import ArgumentError, ArgumentTypeError, AttnScaleError, BackendError
from attnscale.lengths import visible_keys
from attnscale.module import MultiheadAttention, ScaledDotProductAttention
from attnscale.policies import LengthPolicy, Policy, build_policy

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttnScaleError",
    "BackendError",
    "LengthPolicy",
    "MultiheadAttention",
    "Policy",
    "ScaledDotProductAttention",
    "attention_weights",
    "build_policy",
    "convert",
    "doctor",
    "explain_dispatch",
    "scaled_dot_product_attention",
    "visible_keys",
]
