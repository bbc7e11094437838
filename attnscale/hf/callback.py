"""A Trainer callback that adds a monitor's numbers to the Trainer's own logs."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.views.flatten import compact
from attnscale.errors import reject_type


class AttnScaleCallback(TrainerCallback):
    """Tells a monitor of each step, and adds its numbers to the next log.

    Callbacks run in order, and those that report (TensorBoard, W&B, …) come before a user's own: `attach` puts this one
    before them.

        AttnScaleCallback(attnscale.Monitor(model, every=50)).attach(trainer)

    `heads` adds the mean of every head to the spread of every layer. The monitor is closed when training ends.
    """

    def __init__(self, monitor: Monitor, *, heads: bool = False) -> None:
        if not isinstance(monitor, Monitor):
            reject_type("monitor", monitor, "an attnscale.Monitor")
        self.monitor = monitor
        self.heads = heads
        self._found: dict[str, float] = {}

    def attach(self, trainer: Trainer) -> AttnScaleCallback:
        """Make this the first callback of a trainer."""
        if not isinstance(trainer, Trainer):
            reject_type("trainer", trainer, "a transformers.Trainer")
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        return self

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Tell the monitor that an optimizer step has ended."""
        records = self.monitor.step(state.global_step)
        if records:
            self._found = compact(records, heads=self.heads)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the numbers to the log, and to the history, which holds a copy of the log."""
        if logs is None or not self._found or "loss" not in logs:
            return  # the log of an evaluation, or of the whole training
        logs.update(self._found)
        if state.log_history:
            state.log_history[-1].update(self._found)
        self._found = {}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        self.monitor.close()
