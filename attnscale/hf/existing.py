"""Scaling by length that a model brings along: YaRN, LongRoPE, Llama 4, Mistral, DeepSeek, Inkling, Beam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from attnscale.hf.survey import AttentionLayer


@dataclass(frozen=True, eq=False)
class Existing:
    """A factor on the logits that a model applies itself; `switch_off` removes it and returns what undoes that."""

    name: str
    description: str
    switch_off: Callable[[], Callable[[], None]]


def find_existing(model: nn.Module, layer: AttentionLayer) -> list[Existing]:
    """What one attention module is scaled by already."""
    return []
