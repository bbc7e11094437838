"""transformers models in two processes: context parallelism as accelerate sets it up, and Trainer with its callback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import launched_training
from ranks import RANKS, by_accelerate, on_two_ranks
from tiny_models import llama
from torch import distributed

import attnscale
import attnscale.hf
from attnscale import BackendError, Monitor

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
        assert "attention_mask" in masked
        assert "every position 0 … 15 of the sequence exactly once" in packed


def test_a_learned_policy_of_a_bf16_model_is_sharded_like_the_rest(ranks):
    first, second = (rank["sharded"] for rank in ranks)
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
        assert (one != 0).all()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    return by_accelerate(Path(launched_training.__file__), tmp_path_factory.mktemp("launched"))


def test_two_processes_of_accelerate_launch_train_and_report_as_one_does(launched):
    alone = launched_training.train(batch=2)
    for rank in launched:
        assert rank["data parallel"]["kind"] == "DistributedDataParallel"
        assert_trained_alike(rank["data parallel"], alone)
    assert_reported_alike([rank["data parallel"] for rank in launched], alone)


def test_a_parallelism_config_of_accelerate_trains_and_reports_as_one_process_does(launched):
    alone = launched_training.train(batch=1)
    for rotation in launched_training.ROTATIONS:
        for rank in launched:
            assert rank[rotation]["kind"] == "FSDPLlamaForCausalLM"
            assert_trained_alike(rank[rotation], alone)
        assert_reported_alike([rank[rotation] for rank in launched], alone)


def assert_trained_alike(found, alone):
    assert (found["world"], alone["world"]) == (RANKS, 1)
    assert len(found["steps"]) == launched_training.STEPS
    assert found["steps"] == [pytest.approx(step, rel=1e-5) for step in alone["steps"]]
    for one, other in zip(found["learned"], alone["learned"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def assert_reported_alike(found, alone):
    """By the first process; n is that of whole sequences."""
    first, second = (rank["seen"] for rank in found)
    assert [row[:2] for row in first] == [row[:2] for row in alone["seen"]]
    assert [row[2:] for row in first] == [pytest.approx(row[2:]) for row in alone["seen"]]
    assert not second
