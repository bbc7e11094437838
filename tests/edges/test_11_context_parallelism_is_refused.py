"""Number 11: under context parallelism, where a process would count the keys of its own part, the call is refused."""

# ruff: noqa: E402  (transformers is not there for Python 3.10)

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ranks import RANKS, join, on_two_ranks
from tiny_models import TOKENS, llama, logits

import attnscale
import attnscale.hf
from attnscale import BackendError
from attnscale.hf.parallel import sequence_is_split

LAW = {"name": "log", "reference_length": 4}


def refused(rank):
    """What is said in one of two processes, each of which takes its part of the tokens."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    said = {}
    for override in (True, False):
        model = llama().float()
        tokens, positions = TOKENS[:, :8].clone(), torch.arange(8).repeat(2, 1)
        with attnscale.hf.apply(model, LAW, override=override), torch.no_grad():
            expected = model(tokens, position_ids=positions, use_cache=False).logits
            with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 1]):
                assert tokens.shape[1] == 8 // RANKS
                try:
                    model(tokens, position_ids=positions, use_cache=False)
                except BackendError as error:
                    said[override] = str(error)
            again = model(tokens, position_ids=positions, use_cache=False).logits
            assert torch.equal(again, expected)  # afterwards it works as before
    return said


def test_every_rank_is_told_so(tmp_path):
    for said in on_two_ranks(refused, tmp_path):
        assert set(said) == {True, False}
        assert all("context parallelism" in sentence for sentence in said.values())


def test_a_sequence_that_is_a_sharded_tensor_is_refused(tmp_path):
    """The other way in which torch splits a sequence: queries are DTensors."""
    from torch.distributed.tensor import DTensor, Shard

    from attnscale.hf.parallel import refuse_context_parallel

    join(tmp_path)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        query = torch.zeros(1, 2, 4, 8)
        with pytest.raises(BackendError, match="context parallelism"):
            refuse_context_parallel(DTensor.from_local(query, mesh, [Shard(2)]))
        refuse_context_parallel(DTensor.from_local(query, mesh, [Shard(1)]))  # heads: tensor parallelism
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_is_refused_without_it():
    assert not sequence_is_split()
    model = llama()
    with attnscale.hf.apply(model, LAW, override=True):
        logits(model)
