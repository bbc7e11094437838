"""The task and the model of max retrieval: which of n items has the largest priority, and one head that finds it.

The setting is that of Veličković et al., "softmax is not enough" (arXiv:2410.01104). An item has a priority, uniform in
[0, 1], and one of ten classes; the answer is the class of the item with the largest priority. The two largest of n
priorities are about 1/n apart, so the scores that β has to separate close up as n grows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from attnscale.attention import scaled_dot_product_attention
from attnscale.policies import Policy

CLASSES = 10


class Projected(NamedTuple):
    """What the head attends with; the number of heads is 1."""

    query: Tensor  # [B, 1, 1, width]
    key: Tensor  # [B, 1, n, width]
    value: Tensor  # [B, 1, n, width]


class MaxFinder(nn.Module):
    """An MLP per item, one attention head with a learned query, an MLP for the answer. It reads any number of items."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(1 + CLASSES, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.query = nn.Parameter(torch.randn(1, 1, 1, width))
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.decode = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES))

    def project(self, items: Tensor) -> Projected:
        """Query, keys and values of items [B, n, 1 + CLASSES]."""
        encoded = self.encode(items)[:, None]
        return Projected(self.query.expand(len(items), 1, 1, -1), self.key(encoded), self.value(encoded))

    def answer(self, projected: Projected, policy: Policy) -> Tensor:
        """Logits [B, CLASSES] of the answer."""
        logits: Tensor = self.decode(scaled_dot_product_attention(*projected, policy=policy)[:, 0, 0])
        return logits


def draw_items(batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Items [batch, length, 1 + CLASSES], a priority and a one-hot class each, and the answers [batch]."""
    priorities = torch.rand(batch, length, generator=generator, device=generator.device)
    classes = torch.randint(CLASSES, (batch, length), generator=generator, device=generator.device)
    items = torch.cat([priorities[..., None], one_hot(classes, CLASSES).to(priorities.dtype)], dim=-1)
    return items, classes.gather(1, priorities.argmax(1, keepdim=True))[:, 0]
