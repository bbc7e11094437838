"""A real Trainer run: the monitor's numbers in its logs, its history and its TensorBoard files."""

from __future__ import annotations

import pytest
import tiny_gpt
import torch
from torch import nn

from attnscale import ArgumentTypeError, Monitor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Model(nn.Module):
    """A model as the Trainer wants it: labels in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt.build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.gpt.loss(input_ids)}


def make_trainer(folder, **settings):
    data = [{"input_ids": row, "labels": row} for row in tiny_gpt.batch(size=12)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    return transformers.Trainer(Model(), arguments, train_dataset=data)


def test_the_numbers_are_in_the_log_and_reach_tensorboard(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from attnscale.hf import AttnScaleCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(tmp_path, report_to=["tensorboard"])
    monitor = Monitor(trainer.model, every=2, rows=5, alerts=None)
    AttnScaleCallback(monitor, heads=True).attach(trainer)
    assert trainer.callback_handler.callbacks[0].monitor is monitor
    trainer.train()

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    name = "attn/gpt.blocks.0.attention/forward/w_max/mean"
    assert all(0 < entry[name] <= 1 for entry in logged)
    assert all("attn/gpt.blocks.1.attention/h1/forward/w_max/mean" in entry for entry in logged)
    assert trainer.model.gpt.blocks[0].attention.tap is None  # closed with the training

    (events,) = (tmp_path / "tb").rglob("events.*")
    reader = accumulator.EventAccumulator(str(events.parent))
    reader.Reload()
    tag = next(tag for tag in reader.Tags()["scalars"] if tag.endswith("blocks.0.attention/forward/w_max/mean"))
    assert [event.value for event in reader.Scalars(tag)] == pytest.approx([entry[name] for entry in logged])


def test_training_is_the_same_with_and_without(tmp_path):
    from attnscale.hf import AttnScaleCallback

    curves = []
    for watched in (False, True):
        trainer = make_trainer(tmp_path, report_to=[])
        if watched:
            AttnScaleCallback(Monitor(trainer.model, every=1, rows=5)).attach(trainer)
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert curves[0] == curves[1]


def test_what_is_no_monitor_or_trainer_is_refused():
    from attnscale.hf import AttnScaleCallback

    with pytest.raises(ArgumentTypeError, match="monitor="):
        AttnScaleCallback("monitor")
    monitor = Monitor(tiny_gpt.build())
    with pytest.raises(ArgumentTypeError, match="trainer="):
        AttnScaleCallback(monitor).attach("trainer")
