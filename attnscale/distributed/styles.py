"""Styles for torch's `parallelize_module`: attention whose sequence, or whose heads, are spread over a mesh."""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from attnscale._util.processes import OfOneRun, OwnHeads, local, read_group
from attnscale.call.tap import Tap
from attnscale.distributed.context_parallel import METHODS, Method, context_parallel_attention
from attnscale.distributed.shards import TokenShards
from attnscale.errors import ArgumentError, ArgumentTypeError, reject, reject_type
from attnscale.module import ScaledDotProductAttention
from attnscale.policies.adaptive import GapAdaptive
from attnscale.policies.base import LengthPolicy
from attnscale.policies.per_head import PerHead


class ContextParallel(ParallelStyle):
    """Context parallelism of a `ScaledDotProductAttention`, whose calls then need `positions=`.

    >>> from attnscale.distributed import ContextParallel
    >>> plan = {"blocks.*.attention": ContextParallel(method="ring")}

    `parallelize_module(model, mesh["cp"], plan)` applies it; monitors listen as before.
    """

    def __init__(self, method: Method = "gather") -> None:
        if method not in METHODS:
            reject("method", method, f"one of {', '.join(map(repr, METHODS))}")
        self.method = method

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention = _ours(module)
        attention.spread = SpreadSequence(device_mesh, self.method)
        if self.method == "ulysses":  # a monitor hears of the heads that this process has
            part, parts = attention.head_part
            attention.head_part = part * device_mesh.size() + device_mesh.get_local_rank(), parts * device_mesh.size()
        return module


class SpreadSequence(OfOneRun):
    """`context_parallel_attention` over one mesh, for a module."""

    def __init__(self, mesh: DeviceMesh, method: Method) -> None:
        self.mesh, self.method = mesh, method

    def __call__(
        self,
        tap: Tap | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        *,
        positions: Tensor | TokenShards | None = None,
        **rules: Any,
    ) -> Tensor:
        """The output for the tokens of this process."""
        if positions is None:
            raise ArgumentError(
                "positions=None is not accepted under context parallelism: expected the place of each token of this "
                "process in the whole sequence, without which n is not known"
            )
        return context_parallel_attention(
            query, key, value, mesh=self.mesh, positions=positions, method=self.method, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, tap=tap, **rules,
        ).output  # fmt: skip


class HeadParallel(ParallelStyle):
    """Tensor parallelism of a `ScaledDotProductAttention`, of whose heads each process has an equal part, in order.

    Parameters and running estimates of its policy, one per head, become DTensors sharded with the heads (of `per_head`,
    replicated ones, since its parts may lie across processes), and a monitor reports heads by their numbers in the
    whole module. `rows` is the mesh over whose processes rows differ, for running
    estimates; None: all dimensions of the whole mesh but that of the heads.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> from attnscale.distributed import HeadParallel
    >>> plan = {"qkv": ColwiseParallel(), "attention": HeadParallel(), "out": RowwiseParallel()}
    """

    def __init__(self, rows: DeviceMesh | None = None) -> None:
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention, size, policy = _ours(module), device_mesh.size(), _ours(module).policy
        rank, (part, parts) = device_mesh.get_local_rank(), attention.head_part
        attention.head_part = (
            rank * parts + part,
            size * parts,
        )  # parts of these heads, where ulysses was applied before
        if isinstance(policy, LengthPolicy):
            policy.keep(OwnHeads(rank, size, device_mesh.get_group()))
        if isinstance(policy, PerHead):
            _check_heads(policy.num_heads, size)
            _distribute(policy, device_mesh, Replicate())
        elif isinstance(policy, nn.Module):
            for tensor in (*policy.parameters(), *policy.buffers()):
                _check_heads(tensor.shape[0], size)
            _distribute(policy, device_mesh, Shard(0))
        attention.register_forward_pre_hook(_local_inputs)
        share_rows(attention, _others(device_mesh) if self.rows is None else self.rows)
        return module


def _check_heads(heads: int, size: int) -> None:
    if heads % size:
        reject("heads", heads, f"a multiple of the {size} processes")


def _distribute(policy: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Turn the parameters and buffers of a policy and its parts into DTensors."""
    for part in policy.modules():
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            placed: Tensor = distribute_tensor(tensor.detach(), mesh, [placement])
            if isinstance(tensor, nn.Parameter):
                part.register_parameter(name, nn.Parameter(placed, requires_grad=tensor.requires_grad))
            else:
                part.register_buffer(name, placed)


def _local_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The heads of this process, also of projections that give DTensors."""
    return tuple(local(x) if isinstance(x, Tensor) else x for x in inputs)


def share_rows(model: nn.Module, over: DeviceMesh | distributed.ProcessGroup | None) -> None:
    """Say over which processes the rows of a model differ, for the running estimates of its policies.

    They are reduced over these, so that every process uses the same β. Without this call they are reduced over all
    processes, which is right for data and context parallelism alone; None: over none.
    """
    group = read_group("over", over)
    for policy in model.modules():
        if isinstance(policy, GapAdaptive):
            policy.share(group)


def shard_policies(model: nn.Module, **options: Any) -> None:
    """`fully_shard` for each learned policy of a model; call it before `fully_shard` takes the rest, with its keywords.

    For policies in another dtype than the parameters that train beside them, fp32 in a bf16 model: `fully_shard` takes
    parameters of one dtype at a time. A model of one dtype does not need this.
    """
    for module in model.modules():
        if isinstance(module, LengthPolicy) and any(True for _ in module.parameters()):
            fully_shard(module, **options)


def _others(mesh: DeviceMesh) -> DeviceMesh | None:
    """All dimensions of the whole mesh but those of a part of it."""
    root = mesh._get_root_mesh()
    if root.ndim > mesh.ndim and not (root.mesh_dim_names and mesh.mesh_dim_names):
        raise ArgumentError("a mesh without names is not accepted here: expected HeadParallel(rows=...)")
    names = tuple(name for name in root.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ()))
    return root[names] if root.ndim > mesh.ndim else None


def _ours(module: nn.Module) -> ScaledDotProductAttention:
    if isinstance(module, nn.MultiheadAttention):
        raise ArgumentTypeError(
            f"module as {type(module).__name__} is not accepted: its projections are one tensor for all heads, and its "
            "call has no place for positions; expected a ScaledDotProductAttention of attnscale's between projections "
            "of your own"
        )
    if not isinstance(module, ScaledDotProductAttention):
        reject_type("module", type(module).__name__, "a ScaledDotProductAttention of attnscale's")
    return module
