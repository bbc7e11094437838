"""A small GPT on attnscale's attention, for monitor tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scripts.cost.monitor import Gpt


class TinyGpt(Gpt):
    """Two blocks or more; `recompute` is the checkpointing function, if any."""

    def __init__(self, policy: object = "log", layers: int = 2) -> None:
        super().__init__(policy, layers=layers, width=16, heads=2, vocabulary=11)  # type: ignore[arg-type]
        self.recompute: str | None = None

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


def build(seed: int = 0, **arguments: object) -> TinyGpt:
    """The same seed gives the same weights."""
    torch.manual_seed(seed)
    return TinyGpt(**arguments)  # type: ignore[arg-type]


def batch(seed: int = 0, size: int = 2, length: int = 24) -> Tensor:
    """Tokens [size, length]."""
    return torch.randint(11, (size, length), generator=torch.Generator().manual_seed(seed))
