"""Parallel styles for torch's `parallelize_module`: context parallelism and tensor parallelism of attention."""

from __future__ import annotations

from collections.abc import Collection
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
    """Context parallelism of a `ScaledDotProductAttention`. Calls then require `positions=`.

    >>> from attnscale.distributed import ContextParallel
    >>> plan = {"blocks.*.attention": ContextParallel(method="ring")}

    Applied by `parallelize_module(model, mesh["cp"], plan)`. Monitors work unchanged.
    """

    def __init__(self, method: Method = "gather") -> None:
        if method not in METHODS:
            reject("method", method, f"one of {', '.join(map(repr, METHODS))}")
        self.method = method

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention = _ours(module)
        attention.spread = SpreadSequence(device_mesh, self.method)
        if self.method == "ulysses":  # a monitor receives the local heads
            part, parts = attention.head_part
            attention.head_part = part * device_mesh.size() + device_mesh.get_local_rank(), parts * device_mesh.size()
        return module


class SpreadSequence(OfOneRun):
    """`context_parallel_attention` over one mesh, as called by a module."""

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
        """Return the output of the local tokens."""
        if positions is None:
            raise ArgumentError(
                "positions=None is not accepted under context parallelism: expected the position of each local token "
                "in the whole sequence, which determines n"
            )
        return context_parallel_attention(
            query, key, value, mesh=self.mesh, positions=positions, method=self.method, attn_mask=attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, tap=tap, **rules,
        ).output  # fmt: skip


class HeadParallel(ParallelStyle):
    """Tensor parallelism of a `ScaledDotProductAttention`: heads are split evenly over the processes, in order.

    Per-head parameters and running estimates of the policy become DTensors sharded with the heads. Those of `per_head`
    are replicated, since the range of one of its policies may span processes, and so are those without a head axis
    (`LengthPolicy.shared_tensors`). A monitor reports heads by their index in
    the whole module. `rows` is the mesh of processes with different rows, for running estimates; None selects all
    dimensions of the root mesh except those of the tensor-parallel mesh.

    A module of yours that calls torch's own attention function on its local heads is accepted too: it is left as it is,
    and a monitor numbers its heads.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> from attnscale.distributed import HeadParallel
    >>> plan = {"qkv": ColwiseParallel(), "attention": HeadParallel(), "out": RowwiseParallel()}
    """

    def __init__(self, rows: DeviceMesh | None = None) -> None:
        self.rows = rows

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        if _calls_torch(module):
            module.head_part = rank, size  # type: ignore[assignment]
            return module
        attention, policy = _ours(module), _ours(module).policy
        part, parts = attention.head_part
        # `parts` > 1 if ulysses was applied first: it splits these heads further.
        attention.head_part = rank * parts + part, size * parts
        if isinstance(policy, LengthPolicy):
            policy.keep(OwnHeads(rank, size, device_mesh.get_group()))
        if isinstance(policy, PerHead):
            _check_heads(policy.num_heads, size)
            _distribute(policy, device_mesh, Replicate())
        elif isinstance(policy, nn.Module):
            shared = getattr(policy, "shared_tensors", ())
            for name, tensor in (*policy.named_parameters(), *policy.named_buffers()):
                if name not in shared:
                    _check_heads(tensor.shape[0], size)
            _distribute(policy, device_mesh, Shard(0), shared)
        attention.register_forward_pre_hook(_local_inputs)
        share_rows(attention, _others(device_mesh) if self.rows is None else self.rows)
        return module


def _calls_torch(module: nn.Module) -> bool:
    """Whether a module may call torch's own attention function: it is not torch's, and has no attention of ours."""
    ours = any(isinstance(child, ScaledDotProductAttention) for child in module.modules())
    return not ours and not type(module).__module__.startswith(("torch.", "attnscale."))


def _check_heads(heads: int, size: int) -> None:
    if heads % size:
        reject("heads", heads, f"a multiple of the {size} processes")


def _distribute(policy: nn.Module, mesh: DeviceMesh, placement: Placement, shared: Collection[str] = ()) -> None:
    """Convert the parameters and buffers of a policy and its submodules to DTensors; `shared` ones are replicated."""
    for path, part in policy.named_modules():
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            is_shared = (f"{path}.{name}" if path else name) in shared
            placed: Tensor = distribute_tensor(tensor.detach(), mesh, [Replicate() if is_shared else placement])
            if isinstance(tensor, nn.Parameter):
                part.register_parameter(name, nn.Parameter(placed, requires_grad=tensor.requires_grad))
            else:
                part.register_buffer(name, placed)


def _local_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook: convert DTensor inputs to their local heads."""
    return tuple(local(x) if isinstance(x, Tensor) else x for x in inputs)


def share_rows(model: nn.Module, over: DeviceMesh | distributed.ProcessGroup | None) -> None:
    """Set the processes with different rows, for the running estimates of the model's policies.

    Running estimates are reduced over these processes, so that all of them use the same β. By default they are reduced
    over all processes, which is correct for pure data and context parallelism. `over=None` disables the reduction.
    """
    group = read_group("over", over)
    for policy in model.modules():
        if isinstance(policy, GapAdaptive):
            policy.share(group)


def shard_policies(model: nn.Module, **options: Any) -> None:
    """Apply `fully_shard` to each learned policy; call it before `fully_shard(model)`, with the same keywords.

    Needed if the dtype of the policies differs from that of the other trainable parameters, such as fp32 policies in a
    bf16 model: `fully_shard` requires a uniform dtype. A model with one dtype does not need it.
    """
    for module in model.modules():
        if isinstance(module, LengthPolicy) and any(True for _ in module.parameters()):
            fully_shard(module, **options)


def _others(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the root mesh without the dimensions of `mesh`; None if none are left."""
    root = mesh._get_root_mesh()
    if root.ndim > mesh.ndim and not (root.mesh_dim_names and mesh.mesh_dim_names):
        raise ArgumentError("a mesh without mesh_dim_names is not accepted: expected HeadParallel(rows=...)")
    names = tuple(name for name in root.mesh_dim_names or () if name not in (mesh.mesh_dim_names or ()))
    return root[names] if root.ndim > mesh.ndim else None


def _ours(module: nn.Module) -> ScaledDotProductAttention:
    if isinstance(module, nn.MultiheadAttention):
        raise ArgumentTypeError(
            f"module={type(module).__name__} is not accepted: its projections are one tensor for all heads, and its "
            "forward takes no positions; expected attnscale.ScaledDotProductAttention between separate projections"
        )
    if not isinstance(module, ScaledDotProductAttention):
        reject_type("module", type(module).__name__, "an attnscale.ScaledDotProductAttention")
    return module
