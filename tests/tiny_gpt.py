"""A small GPT on attnscale's attention, for tests of what watches it."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnscale import ScaledDotProductAttention
from attnscale.policies import PolicySpec


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around."""

    def __init__(self, width: int, heads: int, policy: PolicySpec) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention = ScaledDotProductAttention(policy)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.inner(self.norms[0](x)), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        x = x + self.outer(rearrange(self.attention(q, k, v, is_causal=True), "b h t d -> b t (h d)"))
        return x + self.mlp(self.norms[1](x))


class TinyGpt(nn.Module):
    """Two or more blocks over a small vocabulary; `recompute` is how checkpointing is done, if it is."""

    def __init__(
        self, policy: PolicySpec = "log", layers: int = 2, width: int = 16, heads: int = 2, vocabulary: int = 11
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, policy) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.recompute: str | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)

    def loss(self, tokens: Tensor) -> Tensor:
        """Of predicting the next token."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build(seed: int = 0, **arguments: object) -> TinyGpt:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return TinyGpt(**arguments)  # type: ignore[arg-type]


def batch(seed: int = 0, size: int = 2, length: int = 24, vocabulary: int = 11) -> Tensor:
    """Tokens [size, length]."""
    return torch.randint(vocabulary, (size, length), generator=torch.Generator().manual_seed(seed))
