"""transformers models in two processes: context parallelism as accelerate sets it up, and Trainer with its callback."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import os
import tempfile

import pytest
import torch

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from ranks import RANKS, on_two_ranks
from tiny_models import llama
from torch import distributed

import attnscale
import attnscale.hf
from attnscale import BackendError, Monitor
from attnscale.diagnostics.sinks import MemorySink

LAWS = {"log": {"name": "log", "reference_length": 4}, "ssmax": {"name": "ssmax", "reference_length": 8}}
LENGTH = 16


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(LENGTH).repeat(2, 1)


def trained(law: str, mesh=None, rotation: str = "allgather") -> dict:
    """Logits, gradients summed over processes, and n as a monitor heard it, with the sequence whole or split."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    model = llama().train()
    handle = attnscale.hf.apply(model, LAWS[law], override=True)
    tokens, places = inputs()
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        if mesh is None:
            logits = model(tokens, position_ids=places, use_cache=False).logits
            logits.square().sum().backward()
        else:
            _attach_context_parallel_hooks(model)
            set_rotate_method(rotation)
            with context_parallel(mesh, buffers=[tokens, places], buffer_seq_dims=[1, 1]):
                own = places[0].clone()
                part = model(tokens, position_ids=places, use_cache=False).logits
                part.square().sum().backward()
            set_rotate_method("allgather")
            logits = part.new_zeros(2, LENGTH, part.shape[-1])
            logits[:, own] = part.detach()
            distributed.all_reduce(logits)
        records = monitor.step(0)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for gradient in gradients.values() if mesh is not None else ():
        distributed.all_reduce(gradient)
    seen = sorted((record.layer, record.head, *record.forward["visible"]) for record in records)
    handle.remove()
    return {"logits": logits.detach(), "gradients": gradients, "seen": seen}


def together(rank: int) -> dict:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    found = {(law, rotation): trained(law, mesh, rotation) for law in LAWS for rotation in ("allgather", "alltoall")}
    found["refused"] = refused(mesh)
    found["sharded"] = sharded_in_half_precision(rank)
    found["heads"] = with_spread_heads()
    found |= {f"trainer {rotation}": in_trainer(rank, rotation) for rotation in (None, "allgather", "alltoall")}
    return found


def refused(mesh) -> list[str]:
    """What is said where n cannot be known: a mask that transformers made of one process's tokens; packed positions."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.tensor.experimental import context_parallel

    said = []
    for hooks, positions in ((False, inputs()[1]), (True, torch.arange(LENGTH // 2).repeat(2, 2))):
        model, (tokens, _) = llama(), inputs()
        with attnscale.hf.apply(model, LAWS["log"], override=True), torch.no_grad():
            if hooks:
                _attach_context_parallel_hooks(model)
            with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1]):
                try:
                    model(tokens, position_ids=positions, use_cache=False)
                except (BackendError, attnscale.ArgumentError) as error:
                    said.append(str(error))
    return said


def sharded_in_half_precision(rank: int) -> list[torch.Tensor]:
    """The gradients of a learned policy that was applied to a bf16 model, which `fully_shard` takes as it is."""
    from torch.distributed.fsdp import fully_shard

    model = llama().to(torch.bfloat16).train()
    handle = attnscale.hf.apply(model, LAWS["ssmax"])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    tokens = inputs()[0][rank : rank + 1]
    model(tokens, labels=tokens).loss.backward()
    return [p.grad.full_tensor() for p in handle.parameters()]


def with_spread_heads() -> dict:
    """Logits, the gradients of a learned policy and the heads that a monitor reports, under tensor parallelism."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from attnscale.distributed import HeadParallel

    model = llama().train()
    handle = attnscale.hf.apply(model, LAWS["ssmax"])
    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh, plan | {"attnscale": HeadParallel()})
    tokens, places = inputs()
    with Monitor(model, every=1, rows=None, alerts=None) as monitor:
        logits = model(tokens, position_ids=places, use_cache=False).logits
        logits.square().sum().backward()
        seen = sorted((record.layer, record.head, *record.forward["visible"]) for record in monitor.step(0))
    return {
        "logits": logits.detach(),
        "gradients": [p.grad.full_tensor() for p in handle.parameters()],
        "seen": seen,
    }


def in_trainer(rank: int | None, rotation: str | None = None) -> dict:
    """Two steps with a monitor's callback: what was learned and logged, and the rows that the reports are of.

    In this process alone (None); data parallel, as `accelerate launch` sets it up; or with FSDP2 and the sequence split
    by accelerate's own `ParallelismConfig`.
    """
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    if rank is not None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}
    model = llama().float().train()
    handle = attnscale.hf.apply(model, LAWS["ssmax"], override=True)
    tokens = torch.randint(1, 64, (8, LENGTH), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=1, use_cpu=True, report_to=[], save_strategy="no",
            ddp_backend=None if rank is None else "gloo", logging_steps=1, disable_tqdm=True, learning_rate=0.05,
            lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        if rotation is not None:
            split_by_accelerate(trainer, rotation)
        memory = MemorySink()
        monitor = Monitor(model, every=1, rows=None, sinks=[memory], alerts=None)
        attnscale.hf.AttnScaleCallback(monitor).attach(trainer)
        trainer.train()
    world = arguments.world_size
    AcceleratorState._reset_state(reset_partial_state=True)  # no other Trainer of this process is to find it
    logged = [log for log in trainer.state.log_history if any("w_max" in name for name in log)]
    learned = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in handle.parameters()]
    seen = [(record.layer, record.head, *record.forward["visible"]) for record in memory.records]
    steps = [(log["loss"], log["grad_norm"]) for log in logged]
    kind = type(trainer.model_wrapped).__name__
    return {"world": world, "learned": learned, "steps": steps, "seen": seen, "kind": kind}


def split_by_accelerate(trainer: transformers.Trainer, rotation: str) -> None:
    """What `TrainingArguments(parallelism_config=...)` does under FSDP2, but on a CPU, where accelerate has no FSDP.

    Its configuration, mesh and check are accelerate's own, and so is all that happens afterwards.
    """
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import DistributedType, TorchContextParallelConfig

    config = ParallelismConfig(cp_size=RANKS, cp_handler=TorchContextParallelConfig(cp_comm_strategy=rotation))
    accelerator, state = trainer.accelerator, trainer.accelerator.state
    state.distributed_type, trainer.is_fsdp_enabled = DistributedType.FSDP, True
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    state.parallelism_config, state.device_mesh = config, config.get_device_mesh("cpu")
    config._validate_accelerator(accelerator)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks(together, tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("law", LAWS)
def test_a_split_sequence_gives_the_numbers_of_the_whole(law, rotation, ranks):
    whole = trained(law)
    for rank in ranks:
        found = rank[law, rotation]
        torch.testing.assert_close(found["logits"], whole["logits"])
        for name, gradient in whole["gradients"].items():
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-6, atol=1e-8)
        assert [row[2:] for row in found["seen"]] == [pytest.approx(row[2:]) for row in whole["seen"]]


def test_spread_heads_have_the_policy_and_the_records_of_the_whole(ranks):
    whole = trained("ssmax")
    learned = [gradient for name, gradient in whole["gradients"].items() if "attnscale" in name]
    for rank in ranks:
        found = rank["heads"]
        torch.testing.assert_close(found["logits"], whole["logits"])
        for one, other in zip(found["gradients"], learned, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
        assert [row[1:] for row in found["seen"]] == [pytest.approx(row[1:]) for row in whole["seen"]]


def test_where_n_cannot_be_known_the_call_says_what_to_pass(ranks):
    for rank in ranks:
        masked, packed = rank["refused"]
        assert "let accelerate prepare the model" in masked
        assert "every place 0 … 15 of the sequence once" in packed


def test_a_learned_policy_of_a_bf16_model_is_sharded_like_the_rest(ranks):
    first, second = (rank["sharded"] for rank in ranks)
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
        assert (one != 0).all()


def test_trainer_trains_a_learned_policy_alike_in_every_process(ranks):
    first, second = (rank["trainer None"] for rank in ranks)
    assert first["world"] == second["world"] == 2
    assert all(torch.equal(a, b) for a, b in zip(first["learned"], second["learned"], strict=True))
    assert len(first["steps"]) == 2


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return in_trainer(None)


def test_trainer_with_a_split_sequence_trains_and_reports_as_one_process_does(alone, ranks):
    for rotation in ("allgather", "alltoall"):
        for rank in ranks:
            found = rank[f"trainer {rotation}"]
            assert found["kind"] == "FSDPLlamaForCausalLM"
            assert found["steps"] == [pytest.approx(step, rel=1e-5) for step in alone["steps"]]
            for one, other in zip(found["learned"], alone["learned"], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        reported = ranks[0][f"trainer {rotation}"]["seen"]  # by the first process
        assert [row[:2] for row in reported] == [row[:2] for row in alone["seen"]]
        assert [row[2:] for row in reported] == [pytest.approx(row[2:]) for row in alone["seen"]]
        assert not ranks[1][f"trainer {rotation}"]["seen"]
