"""A monitor in the Trainer: its numbers in the Trainer's own logs, and so wherever they are reported to."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.views.flatten import compact
from attnscale.errors import reject_type


class AttnScaleCallback(TrainerCallback):
    """Reports each step to a monitor, and adds what it found to the next log.

    Callbacks are called in order, and those that report (TensorBoard, W&B, …) come before a user's own: so let it
    `attach` itself to the trainer, which puts it first.

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
        """Become the first callback of a trainer."""
        if not isinstance(trainer, Trainer):
            reject_type("trainer", trainer, "a transformers.Trainer")
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        return self

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The end of an optimizer step."""
        records = self.monitor.step(state.global_step)
        if records:
            self._found = compact(records, heads=self.heads)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was found to what is logged, and to the history, which has its own copy by now."""
        if logs is None or not self._found or "loss" not in logs:
            return  # a log of evaluation, or of the whole training
        logs.update(self._found)
        if state.log_history:
            state.log_history[-1].update(self._found)
        self._found = {}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing more will come."""
        self.monitor.close()
