"""Training in two processes beyond the test matrix: half precision, checkpoints, distributed heads."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from parallel_model import HEADS, POLICIES, Model, Run, batch, build
from spread_attention import BytesSent
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import attnscale
from attnscale import ArgumentError, BackendError, Monitor
from attnscale.distributed import ContextParallel, HeadParallel, TokenShards, share_rows


def messages(rank: int, mesh: Any) -> dict:
    """Messages that a monitor adds to a step, at two lengths, alone and with a distributed sequence.

    By method and length: the sizes gathered by `step` in each step, and the bytes sent by forward and backward in a
    monitored step and in the next, unmonitored one.
    """
    sent: list[int] = []
    gather = distributed.all_gather_object

    def counted(everywhere: Any, message: Any, **options: Any) -> Any:
        sent.append(len(pickle.dumps(message)))
        return gather(everywhere, message, **options)

    distributed.all_gather_object = counted
    found = {}
    for way in ("alone", "gather", "ulysses", "ring"):
        for length in (16, 64):
            attention, rules = attnscale.ScaledDotProductAttention("log"), {}
            if way != "alone":
                ContextParallel(method=way)._apply(attention, mesh)
                rules["positions"] = TokenShards.of(torch.arange(2 * length), mesh, length)
            x, steps, passed = torch.randn(1, 2, length, 8, requires_grad=True), [], []
            with Monitor(attention, every=2, rows=8, alerts=None) as monitor:
                for step in range(4):
                    with BytesSent() as bytes_sent:
                        attention(x, x, x, is_causal=True, **rules).sum().backward()
                    sent.clear()
                    monitor.step(step)
                    steps.append(list(sent))
                    passed.append(bytes_sent.total)
            found[way, length] = {"steps": steps, "passed": passed}
    distributed.all_gather_object = gather
    return found


BY_QUERY = [(mode, policy) for policy in ("asentmax", "qassmax") for mode in ("tp", "fsdp2")]
BY_QUERY += [("tp", "window_schedule")]


def train_by_query(mode: str, policy: str) -> dict[str, Any]:
    """Training with parameters away from their initial values, where some gradients vanish; a window that grows."""
    run = Run(mode, policy, packed=False)
    for parameter in run.model.block.attention.policy.parameters():
        values = torch.linspace(-0.5, 0.7, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
        with torch.no_grad():
            parameter.copy_(placed_like(values, parameter))
    if policy == "window_schedule":
        attnscale.policies.set_window(run.model, 8)
    return run.train(5, monitored=False)


def placed_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return values
    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


def tensor_parallel(rank: int) -> dict:
    """Training with a policy per head and DTensor queries, and the message for a plan without `HeadParallel`."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found: dict[str, Any] = {"per_head": Run("tp", "per_head", packed=False).train(5)}
    found |= {case: train_by_query(*case) for case in BY_QUERY}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"qkv": ColwiseParallel(), "o": RowwiseParallel()}
    for policy in ("ssmax", "gap_adaptive", "per_head", "asentmax", "qassmax", "log"):
        model = build(policy)
        parallelize_module(model.block, mesh, plan)
        try:
            found[policy, "unsaid"] = model(batch(0)[0], torch.arange(16)).detach()
        except ArgumentError as error:
            found[policy, "unsaid"] = str(error)
    try:
        Monitor(model)
    except ArgumentError as error:
        found["monitor"] = str(error), [module.tap for module in model.modules() if hasattr(module, "tap")]
    Monitor(model, process_group=init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))["dp"]).close()
    attention = attnscale.ScaledDotProductAttention("log")
    heads = DTensor.from_local(torch.ones(1, 2, 8, 4), mesh, [Shard(1)])
    try:
        attention(heads, heads, heads, is_causal=True)
    except BackendError as error:
        found["dtensor"] = str(error)
    HeadParallel()._apply(attention, mesh)
    found["shape"] = list(attention(heads, heads, heads, is_causal=True).shape)
    x, of_each = heads.to_local(), [None, None]
    stats = attnscale.attention_with_stats(x, x, x, policy=attention.policy).stats
    distributed.all_gather_object(of_each, stats)
    found["heads"] = [list(one.heads) for one in of_each]
    try:
        of_each[0].merge(of_each[1])
    except ArgumentError as error:
        found["merged"] = str(error)
    return found


def half_precision(rank: int, mesh: Any) -> dict:
    """The gradient of a learned policy in a bf16 model, sharded like any other; also for a policy kept in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from attnscale.distributed import shard_policies

    found = {}
    for kind in ("alone", "plain", "kept", "mixed"):
        torch.manual_seed(0)
        model = Model("ssmax") if kind == "mixed" else Model("ssmax").to(torch.bfloat16)
        policy, options = model.block.attention.policy, {"mesh": mesh}
        if kind == "kept":
            policy.float()
            shard_policies(model, mesh=mesh)
        if kind == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        rows = slice(None) if kind == "alone" else slice(rank, rank + 1)
        if kind != "alone":
            fully_shard(model.block, **options)
            fully_shard(model, **options)
        tokens, targets = (x[rows] for x in batch(0))
        logits = model(tokens, torch.arange(tokens.shape[1]))
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        found[kind] = policy.s.grad if kind == "alone" else policy.s.grad.full_tensor()
    return found


def skipped_layers(rank: int) -> dict:
    """Messages if one process skips a layer with a shared estimate, and if estimates are not shared."""
    found = {}
    for kind in ("shared", "own"):
        layers = [attnscale.ScaledDotProductAttention(POLICIES["gap_adaptive"]) for _ in range(3)]
        if kind == "own":
            share_rows(nn.ModuleList(layers), None)
        x = torch.randn(1, HEADS, 8, 4, generator=torch.Generator().manual_seed(rank))
        try:
            for skipped in (None, 1):
                for number, layer in enumerate(layers):
                    if rank == 0 or number != skipped:
                        layer(x, x, x, is_causal=True)
        except BackendError as error:
            found[kind] = str(error)
        else:
            found[kind] = layers[0].policy.sums
    return found


SHARDED = [(mode, policy) for mode in ("fsdp2", "tp") for policy in ("ssmax", "gap_adaptive")]


def checkpoints(rank: int) -> dict:
    """Ten steps, a checkpoint, a restart from it, ten more; and the same ten without the restart."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = {}
    for mode, policy in SHARDED:
        folder = f"{os.environ['RANKS_FOLDER']}/{mode}-{policy}"
        run = Run(mode, policy, packed=False)
        run.train(10, monitored=False)
        model, optimizer = get_state_dict(run.model, run.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        again = Run(mode, policy, packed=False)
        model, optimizer = get_state_dict(again.model, again.optimizer)
        saved = {"model": model, "optimizer": optimizer}
        checkpoint.load(saved, checkpoint_id=folder)
        set_state_dict(
            again.model, again.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        restarted = again.train(10, start=10, monitored=False)["state"]
        whole = run.train(10, start=10, monitored=False)["state"]
        found[mode, policy] = {"restarted": restarted, "whole": whole}
    return found


def safetensors(rank: int) -> dict:
    """What a file of one process restores in two, by mode and policy; and a file written by two for one to read."""
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    folder, found = os.environ["RANKS_FOLDER"], {}
    for mode, policy in SHARDED:
        alone = Run("alone", policy, packed=False)
        alone.train(3, monitored=False)
        if rank == 0:
            save_file(alone.model.state_dict(), f"{folder}/alone-{policy}.safetensors")
        distributed.barrier()
        run = Run(mode, policy, packed=False)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_model_state_dict(run.model, load_file(f"{folder}/alone-{policy}.safetensors"), options=options)
        restored = {name: x.clone() for name, x in get_model_state_dict(run.model, options=options).items()}
        run.train(1, start=3, monitored=False)
        written = get_model_state_dict(run.model, options=options)  # full tensors, on the first process only
        if rank == 0:
            save_file(written, f"{folder}/{mode}-{policy}.safetensors")
        found[mode, policy] = {"restored": restored, "expected": alone.model.state_dict()}
    return found
