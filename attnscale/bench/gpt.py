"""A small GPT on attnscale's attention, to measure what watching its training costs."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale.module import ScaledDotProductAttention
from attnscale.policies import PolicySpec


class Block(nn.Module):
    """Attention and MLP, each with a norm before and a residual around."""

    def __init__(self, width: int, heads: int, policy: PolicySpec) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attention: nn.Module = ScaledDotProductAttention(policy)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, T, C]."""
        q, k, v = rearrange(self.inner(self.norms[0](x)), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        x = x + self.outer(rearrange(self.attention(q, k, v, is_causal=True), "b h t d -> b t (h d)"))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Gpt(nn.Module):
    """Blocks over a small vocabulary."""

    def __init__(
        self, policy: PolicySpec = "log", layers: int = 6, width: int = 256, heads: int = 4, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, policy) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        logits: Tensor = self.head(x)
        return logits

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        """One block; where checkpointing would go."""
        out: Tensor = block(x)
        return out

    def loss(self, tokens: Tensor) -> Tensor:
        """Of predicting the next token."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_gpt(seed: int = 0, **arguments: object) -> Gpt:
    """The same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gpt(**arguments)  # type: ignore[arg-type]
