"""Callbacks for `Monitor(on_alert=...)`: stop the run, save a checkpoint, lower the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attnscale._util.checks import read_number
from attnscale.diagnostics.records.record import Event
from attnscale.errors import AttnScaleError, reject

Action = Callable[[Event], None]


class RunStopped(AttnScaleError):
    """Raised by `stop`. `event` is the event that stopped the run."""

    def __init__(self, event: Event) -> None:
        super().__init__(f"{event.message}. {event.advice}")
        self.event = event


def _concerns(event: Event, critical_only: bool) -> bool:
    return event.status != "over" and (event.severity == "critical" or not critical_only)


def stop(*, critical_only: bool = True) -> Action:
    """Return a callback that raises `RunStopped`.

    Args:
        critical_only: ignore events of severity "warning".

    Example:
        >>> import attnscale
        >>> attention = attnscale.ScaledDotProductAttention()
        >>> attnscale.Monitor(attention, on_alert=stop()).close()
    """

    def act(event: Event) -> None:
        if _concerns(event, critical_only):
            raise RunStopped(event)

    return act


def save_checkpoint(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    critical_only: bool = True,
) -> Action:
    """Return a callback that saves the state of a model when an event begins, once per event.

    Args:
        folder: created if missing. The file is `event<number>-step<step>.pt`, with the keys "model", "optimizer" and
            "event".
        model: the model.
        optimizer: its optimizer, if it should be saved too.
        critical_only: ignore events of severity "warning".

    Example:
        >>> import attnscale, tempfile
        >>> attention = attnscale.ScaledDotProductAttention()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     attnscale.Monitor(attention, on_alert=save_checkpoint(folder, attention)).close()
    """

    def act(event: Event) -> None:
        if event.status == "begun" and _concerns(event, critical_only):
            content: dict[str, Any] = {"model": model.state_dict(), "event": event.as_dict()}
            if optimizer is not None:
                content["optimizer"] = optimizer.state_dict()
            Path(folder).mkdir(parents=True, exist_ok=True)
            torch.save(content, Path(folder) / f"event{event.number}-step{event.step}.pt")

    return act


def lower_learning_rate(optimizer: torch.optim.Optimizer, factor: float = 0.5, *, critical_only: bool = True) -> Action:
    """Return a callback that multiplies the learning rates of an optimizer when an event begins, once per event.

    A scheduler that computes rates from its own base rates (`LambdaLR`, `CosineAnnealingLR`) undoes this at its next
    step, unless it works with `factor` on the current rate; its `base_lrs` are scaled too where the optimizer's groups
    hold "initial_lr".

    Args:
        optimizer: its parameter groups are changed in place.
        factor: between 0 and 1.
        critical_only: ignore events of severity "warning".

    Raises:
        ArgumentError: `factor` is not between 0 and 1.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> event = Event(0, "collapse", "begun", "critical", 0, 0, (), "entropy fell", "lower the learning rate")
        >>> lower_learning_rate(optimizer)(event)
        >>> optimizer.param_groups[0]["lr"]
        0.05
    """
    factor = read_number("factor", factor, "a number between 0 and 1")
    if not 0 < factor < 1:
        reject("factor", factor, "a number between 0 and 1")

    def act(event: Event) -> None:
        if event.status == "begun" and _concerns(event, critical_only):
            for group in optimizer.param_groups:
                group["lr"] *= factor
                if "initial_lr" in group:
                    group["initial_lr"] *= factor

    return act
