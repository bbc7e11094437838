"""Tensors of one process among several: the part of a DTensor, and sums over a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from attnscale.errors import BackendError, reject_type


def local(x: Tensor) -> Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def read_group(argument: str, over: object) -> distributed.ProcessGroup | None:
    """A process group, or that of a DeviceMesh, all of whose dimensions count; None stays None."""
    if over is None:
        return None
    if distributed.is_available():
        if isinstance(over, distributed.device_mesh.DeviceMesh):
            return (over if over.ndim == 1 else over._flatten()).get_group()
        if isinstance(over, distributed.ProcessGroup):
            return over
    reject_type(argument, over, "a torch.distributed.ProcessGroup that this process belongs to, a DeviceMesh or None")


class OfOneRun:
    """Base of what refers to the processes of one run: copies are the same object, and a pickled one is None."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OfOneRun:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class RowGroup(OfOneRun):
    """The processes over which rows differ: `group`, or None for this process alone."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self.group = group


class OwnHeads(OfOneRun):
    """Which of the heads that are spread evenly over the processes of a group this process has."""

    def __init__(self, part: int, parts: int, group: distributed.ProcessGroup) -> None:
        self.part, self.parts, self.group = part, parts, group

    def of(self, x: Tensor) -> Tensor:
        """The own heads of a tensor [..., H, T] that all processes have; its gradient is the same in all of them."""
        found: Tensor = _OwnHeads.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def range_of(self, heads: int) -> slice:
        """The own ones of so many heads."""
        return slice(self.part * heads // self.parts, (self.part + 1) * heads // self.parts)


class _OwnHeads(torch.autograd.Function):
    """A slice, whose gradient is that of the slices of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: OwnHeads) -> Tensor:
        ctx.own, ctx.shape = own, x.shape
        return x[..., own.range_of(x.shape[-2]), :].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole[..., ctx.own.range_of(ctx.shape[-2]), :] = gradient
        return _sum(whole, ctx.own.group), None


def sum_over_rows(x: Tensor, rows: RowGroup | None, number: Callable[[], int]) -> Tensor:
    """The sum over the processes whose rows differ; over all processes where nothing was said of them.

    `number` says of which estimate it is. Processes that have come to different ones are told so: they would add up
    what does not belong together.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return x
    group = distributed.group.WORLD if rows is None else rows.group
    if group is None or distributed.get_world_size(group) == 1:
        return x
    own = x.new_tensor([1.0, number(), number() ** 2])
    try:
        summed = _sum(torch.cat([x.flatten(), own]), group)
    except RuntimeError as error:
        raise BackendError(f"{_ALONE}: {error}") from error
    total, (size, mean, square) = torch.split(summed, [x.numel(), 3])
    # All numbers are equal if the square of their sum is as large as it can be.
    _assert(size * square == mean * mean, _OUT_OF_STEP)
    return total.view_as(x)


_ALONE = (
    "the running estimate of this layer could not be added up over the processes: one has ended, or has skipped the "
    "layer while the others waited for it (let every process call every layer, or call "
    "attnscale.distributed.share_rows(model, None), with which each process learns from its own rows)"
)
_OUT_OF_STEP = (
    "the processes have come to different layers, whose running estimates cannot be added up: let every process call "
    "every layer (no LayerDrop), or call attnscale.distributed.share_rows(model, None), with which each process learns "
    "from its own rows"
)


def _assert(condition: Tensor, message: str) -> None:
    """Raise where a condition does not hold; on other devices than the CPU without waiting for them."""
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(condition):
            raise BackendError(message)
    else:
        torch._assert_async(condition, message)


def _sum(x: Tensor, group: distributed.ProcessGroup) -> Tensor:
    from torch.distributed import _functional_collectives as collectives  # not needed in most programs

    return wait(collectives.all_reduce(x, "sum", group))


def wait(x: Tensor) -> Tensor:
    """What a functional collective gives, once it is there."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(x)  # type: ignore[no-untyped-call, no-any-return]
