"""A real Trainer run: the monitor's numbers in its logs, its history and its TensorBoard files."""

from __future__ import annotations

import pytest
import tiny_gpt
import torch
from torch import nn

from attnscale import ArgumentTypeError, Monitor
from attnscale.diagnostics import JsonlSink
from attnscale.diagnostics.records.file import scan

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


def test_a_few_numbers_are_printed_and_all_reach_tensorboard(tmp_path, monkeypatch, capsys):
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
    short = {"attn/max_logit", "attn/entropy_share", "attn/min_gain", "attn/events"}
    assert all({name for name in entry if name.startswith("attn/")} == short for entry in logged)
    assert all(0 < entry["attn/entropy_share"] <= 1 and entry["attn/events"] == 0 for entry in logged)
    printed = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(printed) == 3
    assert all(line.count("attn/") == 4 for line in printed)
    assert trainer.model.gpt.blocks[0].attention.tap is None  # closed with the training

    (events,) = (tmp_path / "tb").rglob("events.*")
    reader = accumulator.EventAccumulator(str(events.parent))
    reader.Reload()
    tags = reader.Tags()["scalars"]
    for ending in ("blocks.0.attention/forward/w_max/mean", "blocks.1.attention/h1/forward/w_max/mean"):
        (tag,) = (tag for tag in tags if tag.endswith(ending))
        assert [event.step for event in reader.Scalars(tag)] == [2, 4, 6]
        assert all(0 < event.value <= 1 for event in reader.Scalars(tag))
    (tag,) = (tag for tag in tags if tag.endswith("attn/max_logit"))
    expected = [entry["attn/max_logit"] for entry in logged]
    assert [event.value for event in reader.Scalars(tag)] == pytest.approx(expected)


def test_learning_rate_and_last_logged_loss_are_stored(tmp_path):
    from attnscale.hf import AttnScaleCallback

    trainer = make_trainer(tmp_path, report_to=[], learning_rate=0.5, lr_scheduler_type="constant")
    sink = JsonlSink(tmp_path / "attn.jsonl")
    AttnScaleCallback(Monitor(trainer.model, every=2, rows=5, sinks=[sink], alerts=None)).attach(trainer)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    reports = list(scan(sink.path).decode())
    assert [report.lr for report in reports] == [0.5] * 4
    assert [report.loss for report in reports] == [None, None, *logged[:2]]


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
