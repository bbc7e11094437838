"""Which providers are compared with which: attention, levels of statistics, the adaptive policy, decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from attnscale.bench.gpu.adaptive import ADAPTIVE
from attnscale.bench.gpu.decoding import DECODING
from attnscale.bench.gpu.ours import ATTNSCALE, STATISTICS
from attnscale.bench.gpu.problem import Problem
from attnscale.bench.gpu.profile import DTYPES, Profile
from attnscale.bench.gpu.provider import Provider
from attnscale.bench.gpu.rivals import EAGER, EAGER_STATISTICS, FLASH_ATTN, FLEX, SDPA

# What a user would have instead; the slow ones are measured and are nobody's yardstick.
RIVALS = tuple(provider.name for provider in (*SDPA, *FLASH_ATTN, FLEX) if provider.name != "sdpa_math")


class Suite(NamedTuple):
    """Providers of one question; times are also given over those of the fastest of `baselines` at each length."""

    providers: tuple[Provider, ...]
    modes: tuple[str, ...]
    baselines: tuple[str, ...]


SUITES = {
    "attention": Suite((ATTNSCALE, *SDPA, *FLASH_ATTN, FLEX, EAGER), ("forward", "forward+backward"), RIVALS),
    "statistics": Suite((*STATISTICS, EAGER_STATISTICS), ("forward",), ("none",)),
    "adaptive": Suite((ATTNSCALE, *ADAPTIVE), ("forward",), ("attnscale",)),
    "decode": Suite((ATTNSCALE, *DECODING, *SDPA, *FLASH_ATTN, FLEX, EAGER), ("forward",), RIVALS),
}


class Group(NamedTuple):
    """One suite in one mode, dtype and head dimension, at all its lengths."""

    suite: str
    mode: str
    dtype: torch.dtype
    dim: int

    def problems(self, profile: Profile, device: torch.device) -> list[Problem]:
        """What is measured, the shortest first."""
        decode = self.suite == "decode"
        tokens = profile.decode_tokens if decode else profile.tokens
        return [
            Problem(
                batch=max(1, tokens // keys),
                heads=profile.heads,
                kv_heads=profile.decode_kv_heads if decode else profile.kv_heads,
                queries=1 if decode else keys,
                keys=keys,
                dim=self.dim,
                dtype=self.dtype,
                device=device,
                law=profile.law,
            )
            for keys in sorted(profile.decode_lengths if decode else profile.lengths)
        ]


def groups(profile: Profile) -> Iterator[Group]:
    """Everything a profile measures, in order."""
    for suite in profile.suites:
        for dtype in profile.dtypes:
            for dim in profile.head_dims:
                for mode in SUITES[suite].modes:
                    yield Group(suite, mode, DTYPES[dtype], dim)
