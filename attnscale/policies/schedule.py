"""Policies that follow a training schedule: state that a hook in the training loop changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from attnscale._util.processes import local
from attnscale.errors import ArgumentError, reject
from attnscale.policies.base import LengthPolicy, real
from attnscale.policies.fields import length, positive, read_length


@dataclass(eq=False, repr=False, kw_only=True)
class WindowSchedule(LengthPolicy):
    """Window schedule (modded-nanogpt): β starts at 1 and is multiplied by 1 + 0.2·ln(new/old) at each window change.

    `set_window` announces a change of the attention window; the current window and β are buffers, so that they are part
    of a checkpoint and a resumed run continues with them. The factors depend on the steps: one change by a factor of 4
    gives 1.2773, two changes by a factor of 2 give 1.2965. The same β for every row, with the shape of n. Left out: the
    stretching of the rotary frequencies at each change.

    Args:
        window: The first window.
        coefficient: The factor 0.2 of the logarithm.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("window_schedule", window=384)
        >>> policy.set_window(896)
        >>> policy(8192)
        tensor(1.1695)
    """

    name = "window_schedule"
    shared_tensors: ClassVar[tuple[str, ...]] = ("current_window", "beta")
    window: int = length(least=1)
    coefficient: float = positive(0.2)

    current_window: Tensor = field(init=False)  # int64
    beta: Tensor = field(init=False)  # fp64

    def validate(self) -> None:
        self.register_buffer("current_window", torch.empty((), dtype=torch.int64))
        self.register_buffer("beta", torch.empty((), dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to the first window, with β = 1."""
        self.current_window.fill_(self.window)
        self.beta.fill_(1.0)

    def set_window(self, window: int) -> None:
        """Announce the window of the next steps; the current window again changes nothing. Reads the device once.

        Raises:
            ArgumentError: `window` is not an int ≥ 1, or so much smaller than the current one that β would not be > 0.
        """
        self._advance(window, self._factor(window))

    def _factor(self, window: int) -> float:
        new, old = read_length("window", window, least=1), int(local(self.current_window))
        factor = 1 + self.coefficient * math.log(new / old)
        if factor <= 0:
            reject("window", window, f"a window > {old * math.exp(-1 / self.coefficient):.4g}, where β stays positive")
        return factor

    @torch.no_grad()
    def _advance(self, window: int, factor: float) -> None:
        local(self.beta).mul_(factor)
        local(self.current_window).fill_(window)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return local(self.beta) * torch.ones_like(real(n))

    def longest_beta(self) -> float:
        return 1.0  # changes with the schedule


def set_window(model: nn.Module, window: int) -> None:
    """Announce a new attention window to every `window_schedule` policy of a model, or of a policy itself.

    For the training loop: call it where the window changes. An invalid window changes no policy.

    Raises:
        ArgumentError: The model has no such policy, or `window` is invalid.

    Example:
        >>> import attnscale
        >>> attention = attnscale.ScaledDotProductAttention({"name": "window_schedule", "window": 384})
        >>> attnscale.policies.set_window(attention, 896)
        >>> int(attention.policy.current_window)
        896
    """
    policies = [part for part in model.modules() if isinstance(part, WindowSchedule)]
    if not policies:
        raise ArgumentError(f"model={type(model).__name__} is not accepted: it has no window_schedule policy")
    factors = [policy._factor(window) for policy in policies]
    for policy, factor in zip(policies, factors, strict=True):
        policy._advance(window, factor)
