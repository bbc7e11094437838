"""A learned policy is applied before DDP or FSDP wrap the model, and then stays synchronised."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from ranks import join, on_two_ranks
from tiny_models import llama, logits

import attnscale
import attnscale.hf
from attnscale import ArgumentError


def trained(rank):
    """What a policy learns in one of two processes, each of which has tokens of its own."""
    model = llama().float().train()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    tokens = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return {"values": [p.detach() for p in handle.parameters()], "gradients": [p.grad for p in handle.parameters()]}


def test_applied_before_ddp_it_learns_alike_on_every_rank(tmp_path):
    first, second = on_two_ranks(trained, tmp_path)
    start = 1 / torch.log(torch.tensor(8.0))
    for kind in ("values", "gradients"):
        assert len(first[kind]) == 2
        assert all(torch.equal(a, b) for a, b in zip(first[kind], second[kind], strict=True))
    assert all((gradient != 0).all() for gradient in first["gradients"])
    assert all((value != start).all() for value in first["values"])


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    join(tmp_path)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("inner", [False, True])
def test_after_ddp_a_learned_policy_is_refused(inner):
    model = llama().float()
    before = logits(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ArgumentError, match=r"wrapped in DistributedDataParallel.*attnscale\.hf\.apply first"):
        attnscale.hf.apply(model if inner else wrapped, "ssmax")
    assert torch.equal(logits(model), before)
    assert not any("attnscale" in name for name, _ in model.named_modules())
    # Policies without parameters need no synchronisation, and other models are not affected.
    attnscale.hf.apply(wrapped, "log", reference_length=4).remove()
    attnscale.hf.apply(llama(), "ssmax").remove()
    del wrapped
    attnscale.hf.apply(model, "ssmax").remove()


@pytest.mark.usefixtures("group")
def test_after_sharding_a_learned_policy_is_refused():
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = llama().float()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ArgumentError, match="wrapped in fully_shard"):
        attnscale.hf.apply(model, "ssmax")
    fully_shard(model, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"first, then fully_shard"):
        attnscale.hf.apply(model, "ssmax")
    with pytest.raises(ArgumentError, match="wrapped in fully_shard"):
        attnscale.hf.apply(model.model, "ssmax")


@pytest.mark.usefixtures("group")
def test_after_the_earlier_kind_of_sharding_a_learned_policy_is_refused():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = llama().float()
    whole = ShardingStrategy.NO_SHARD  # one process has one shard
    wrapped = FullyShardedDataParallel(
        model, sharding_strategy=whole, device_id=torch.device("cpu"), use_orig_params=True
    )
    for given in (wrapped, model):
        with pytest.raises(ArgumentError, match="wrapped in FullyShardedDataParallel"):
            attnscale.hf.apply(given, "ssmax")


@pytest.mark.usefixtures("group")
def test_applied_before_sharding_it_is_trained():
    from torch.distributed.fsdp import fully_shard

    model = llama().float().train()
    handle = attnscale.hf.apply(model, "ssmax", reference_length=8)
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    tokens = torch.arange(1, 9)[None]
    model(tokens, labels=tokens).loss.backward()
    assert all((p.grad.full_tensor() != 0).all() for p in handle.parameters())


@pytest.mark.usefixtures("group")
def test_a_policy_that_is_loaded_comes_before_the_wrapper_too(tmp_path):
    model = llama().float()
    with attnscale.hf.apply(model, "ssmax") as handle:
        handle.save(tmp_path)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ArgumentError, match="wrapped in DistributedDataParallel"):
        attnscale.hf.load_policy(wrapped, tmp_path)
