"""What dispatch relies on in a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import Attended
from attnscale.statistics import AttentionOutput, RowStats, StatsRequest


class Backend(Protocol):
    """A way to compute attention."""

    name: str
    plain: bool  # made of torch's own operators, with all their derivatives; else forward and backward only

    @property
    def automatic(self) -> bool:
        """Whether "auto" may choose it; otherwise it runs only on explicit request."""

    @property
    def why_unsupported(self) -> Callable[[torch.device, torch.dtype], str | None] | None:
        """Returns why a device and dtype are not supported, or None if they are; None for a backend of any device."""

    def why_not(self, call: AttentionCall) -> str | None:
        """Why this call cannot be computed here, or None if it can."""

    def run(self, call: AttentionCall) -> Tensor:
        """The output [B, H, Tq, Dv]."""

    def run_bounded(self, call: AttentionCall) -> Attended:
        """The same output, with a bound of each row's largest logit if it is a by-product."""


class MeasuringBackend(Backend, Protocol):
    """A backend that gives row statistics too."""

    def measure(self, call: AttentionCall, request: StatsRequest) -> AttentionOutput:
        """The output and the statistics of all rows."""

    def statistics(self, call: AttentionCall, request: StatsRequest) -> RowStats:
        """The statistics without the output."""
