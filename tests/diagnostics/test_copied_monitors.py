"""Whatever holds a monitor can be copied and saved; the copy runs, and nothing listens to it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field

import pytest
import tiny_gpt
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from attnscale import Monitor, ScaledDotProductAttention
from attnscale.diagnostics import MemorySink
from attnscale.diagnostics.listener import TensorIdentity


class Watched(nn.Module):
    """A model that holds its own monitor, in several ways."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.gpt = tiny_gpt.build()
        self.monitor = Monitor(self.gpt, every=1, sinks=[MemorySink()], **arguments)  # type: ignore[arg-type]
        self.several = [{"monitor": self.monitor}, self.monitor.layers]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt.loss(tokens)


@dataclass
class Run:
    """Something else that holds one."""

    monitor: Monitor
    notes: list[object] = field(default_factory=list)


def by_pickle(x: object) -> object:
    return pickle.loads(pickle.dumps(x))


def by_torch(x: object) -> object:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, by_pickle, by_torch]


def assert_closed(monitor: Monitor) -> None:
    assert isinstance(monitor, Monitor)
    assert monitor.step(0) == monitor.step(1) == []
    assert monitor.layers == {}
    with monitor:
        pass
    monitor.close()


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("when", ["before", "forward", "backward"])
def test_a_copy_of_a_model_that_holds_its_monitor_runs_and_is_not_listened_to(copied, when):
    model = Watched()
    loss = model(tiny_gpt.batch()) if when != "before" else None
    if loss is not None and when == "backward":
        loss.backward()
    other = copied(model)
    assert_closed(other.monitor)
    assert_closed(other.several[0]["monitor"])
    assert all(block.attention.tap is None for block in other.gpt.blocks)
    other(tiny_gpt.batch(1)).backward()
    if when == "forward":
        loss.backward()
    records = model.monitor.step(0)
    assert {record.forward["w_max"].rows for record in records} == ({46} if loss is not None else set())
    assert len(records) == (4 if loss is not None else 0)
    model.monitor.close()


@pytest.mark.parametrize("copied", [copy.copy, *COPIES])
def test_copies_in_dataclasses_lists_and_callbacks_are_closed(copied):
    model = Watched()
    model(tiny_gpt.batch()).backward()
    assert_closed(copied(model.monitor))
    if copied is not copy.copy:
        assert_closed(copied(Run(model.monitor)).monitor)
        assert_closed(copied([model.monitor])[0])
        assert copied(list(model.monitor.layers.values())) == [None, None]
        assert copied(model.gpt.blocks[0].attention).tap is None
    assert len(model.monitor.step(0)) == 4
    model.monitor.close()


@pytest.mark.parametrize("copied", COPIES)
def test_a_callback_of_the_trainer_is_copied_with_a_closed_monitor(copied):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from attnscale.hf import AttnScaleCallback

    model = Watched()
    callback = AttnScaleCallback(model.monitor)
    assert_closed(copied(callback).monitor)
    model.monitor.close()


def test_weak_references_to_storages_are_never_copied():
    x = torch.zeros(3)
    identity = TensorIdentity(x)
    assert [copy.copy(identity), copy.deepcopy(identity), by_pickle(identity)] == [None] * 3


def test_an_average_of_the_weights_is_kept_beside_a_monitored_model():
    model = Watched()
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(tiny_gpt.batch(step)).backward()
        optimizer.step()
        average.update_parameters(model)
        assert len(model.monitor.step(step)) == 4
        assert_closed(average.module.monitor)
        copy.deepcopy(average)
    model.monitor.close()


SCRIPT = textwrap.dedent(
    """
    import copy, gc, pickle, torch
    from attnscale import Monitor, ScaledDotProductAttention

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = ScaledDotProductAttention("log")
            self.monitor = Monitor(self.attention, every=1, alerts=None)

        def forward(self, x):
            return self.attention(x, x, x, is_causal=True)

    for turn in range(30):
        model = Model()
        x = torch.randn(2, 2, 16, 8, requires_grad=True)
        out = model(x)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
        held = copy.deepcopy([model.monitor, dict(model.monitor.layers), model.monitor._tapped])
        for one in copies:
            one(x).sum().backward()
        del copies, held
        gc.collect()
        out.sum().backward()
        assert len(model.monitor.step(turn)) == 2
        if turn % 2:
            model.monitor.close()
    print("done")
    """
)


def test_a_process_that_copies_again_and_again_ends_well():
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert (run.returncode, run.stdout.strip(), run.stderr.strip()) == (0, "done", "")


def test_a_shallow_copy_of_a_module_does_not_outlive_the_monitor():
    attention = ScaledDotProductAttention("log")
    monitor = Monitor(attention, every=1)
    shallow = copy.copy(attention)  # shares what the module holds, as replicas of torch.nn.DataParallel do
    monitor.close()
    assert attention.tap is None
    x = torch.randn(1, 2, 8, 8)
    assert torch.equal(shallow(x, x, x), attention(x, x, x))
    assert monitor.step(1) == []
