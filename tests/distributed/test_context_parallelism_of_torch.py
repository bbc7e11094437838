"""Under context parallelism, where a process would count the keys of its own part, the call is refused."""

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
from attnscale.call.torch_arguments import sequence_is_split

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
    said["function"], said["patch"] = plain_calls_refused(mesh)
    return said


def plain_calls_refused(mesh):
    """The same of our function, and of torch's with a patch, which torch finds by its name and replaces."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional as F

    q = torch.randn(1, 2, 8, 8)
    said = []
    for patched in (False, True):
        patch = attnscale.patch_torch(LAW) if patched else None
        before, names = F.scaled_dot_product_attention, set(vars(F))
        whole = attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy=LAW)
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
            assert F.scaled_dot_product_attention is not before
            given = attnscale.scaled_dot_product_attention  # n of the whole sequence is known here
            given(q, q, q, policy=LAW, visible=torch.full((8 // RANKS,), 8), backend="reference")
            try:
                if patched:
                    F.scaled_dot_product_attention(q, q, q, is_causal=True)
                else:
                    attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy=LAW)
            except BackendError as error:
                said.append(str(error))
        assert F.scaled_dot_product_attention is before
        assert set(vars(F)) == names
        assert torch.equal(attnscale.scaled_dot_product_attention(q, q, q, is_causal=True, policy=LAW), whole)
        if patch is not None:
            patch.remove()
    return said


def test_every_rank_is_told_so(tmp_path):
    for said in on_two_ranks(refused, tmp_path):
        assert set(said) == {True, False, "function", "patch"}
        assert all("context parallelism" in sentence for sentence in said.values())


def test_a_sequence_that_is_a_sharded_tensor_is_refused(tmp_path):
    """The other way in which torch splits a sequence: queries are DTensors."""
    from torch.distributed.tensor import DTensor, Shard

    from attnscale.hf.sites import refuse_split_sequence

    join(tmp_path)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        query = torch.zeros(1, 2, 4, 8)
        with pytest.raises(BackendError, match="context parallelism"):
            refuse_split_sequence(DTensor.from_local(query, mesh, [Shard(2)]))
        refuse_split_sequence(DTensor.from_local(query, mesh, [Shard(1)]))  # heads: tensor parallelism
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_is_refused_without_it():
    assert not sequence_is_split()
    model = llama()
    with attnscale.hf.apply(model, LAW, override=True):
        logits(model)
