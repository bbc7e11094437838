"""Protocols of backends, as used by dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest


class Backend(Protocol):
    """Computes attention."""

    name: str
    plain: bool  # built from torch operators, with all derivatives; otherwise forward and first-order backward only

    @property
    def automatic(self) -> bool:
        """Whether "auto" may choose the backend; otherwise it runs only on explicit request."""

    @property
    def why_unsupported(self) -> Callable[[torch.device, torch.dtype], str | None] | None:
        """Returns why a device and dtype are unsupported, or None if supported. None: all devices are supported."""

    def why_not(self, call: AttentionCall) -> str | None:
        """Return why the backend cannot compute this call, or None if it can."""

    def run(self, call: AttentionCall) -> Tensor:
        """Return the output [B, H, Tq, Dv]."""

    def run_bounded(self, call: AttentionCall) -> Attended:
        """The same output, with a bound of each row's largest logit if it is a by-product."""


class MeasuringBackend(Backend, Protocol):
    """A backend that also computes row statistics."""

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        """Return the output and the statistics of all rows."""

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        """Return the statistics without the output."""
