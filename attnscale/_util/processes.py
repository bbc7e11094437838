"""Distributed helpers: local parts of DTensors, and sums over a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from attnscale.errors import BackendError, reject_type


def local(x: Tensor) -> Tensor:
    """Return the local part of a DTensor; other tensors are returned unchanged."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def read_group(argument: str, over: object) -> distributed.ProcessGroup | None:
    """Return a process group, or that of a DeviceMesh over all its dimensions; None stays None."""
    if over is None:
        return None
    if distributed.is_available():
        if isinstance(over, distributed.device_mesh.DeviceMesh):
            return (over if over.ndim == 1 else over._flatten()).get_group()
        if isinstance(over, distributed.ProcessGroup):
            return over
    reject_type(argument, over, "a torch.distributed.ProcessGroup that this process belongs to, a DeviceMesh or None")


class OfOneRun:
    """Base class of objects tied to the processes of one run: copies are the same object, pickles are None."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OfOneRun:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class RowGroup(OfOneRun):
    """The processes with different rows: `group`, or None for this process alone."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self.group = group


class OwnHeads(OfOneRun):
    """The heads of this process, where heads are distributed evenly over a group."""

    def __init__(self, part: int, parts: int, group: distributed.ProcessGroup) -> None:
        self.part, self.parts, self.group = part, parts, group

    def of(self, x: Tensor) -> Tensor:
        """Return the local heads of a replicated tensor [..., H, T]; its gradient is identical on all processes."""
        found: Tensor = _OwnHeads.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def shared(self, x: Tensor) -> Tensor:
        """Return a tensor used by the heads of all processes; its gradient is summed over the processes."""
        found: Tensor = _Shared.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def range_of(self, heads: int) -> slice:
        """Return the local range out of `heads` heads."""
        return slice(self.part * heads // self.parts, (self.part + 1) * heads // self.parts)


class _OwnHeads(torch.autograd.Function):
    """A slice whose gradient sums the gradients of the slices of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: OwnHeads) -> Tensor:
        ctx.own, ctx.shape = own, x.shape
        return x[..., own.range_of(x.shape[-2]), :].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.new_zeros(ctx.shape)
        whole[..., ctx.own.range_of(ctx.shape[-2]), :] = gradient
        return _sum(whole, ctx.own.group), None


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: OwnHeads) -> Tensor:
        ctx.own = own
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient.contiguous(), ctx.own.group), None


def sum_over_rows(x: Tensor, rows: RowGroup | None, number: Callable[[], int]) -> Tensor:
    """Sum over the processes with different rows; over all processes if `rows` is None.

    `number` identifies the estimate. Processes that reduce different estimates at the same time raise, because their
    sums would be meaningless.
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
    # The numbers are equal exactly if size · Σ x² = (Σ x)².
    _assert(size * square == mean * mean, _OUT_OF_STEP)
    return total.view_as(x)


_ALONE = (
    "the running estimate of this layer could not be reduced over the processes: one of them has ended or skipped the "
    "layer. Call every layer in every process, or call attnscale.distributed.share_rows(model, None) to estimate from "
    "local rows only"
)
_OUT_OF_STEP = (
    "the processes are at different layers, so their running estimates cannot be reduced. Call every layer in every "
    "process (no LayerDrop), or call attnscale.distributed.share_rows(model, None) to estimate from local rows only"
)


def _assert(condition: Tensor, message: str) -> None:
    """Raise if a condition does not hold; asynchronously on devices other than the CPU."""
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(condition):
            raise BackendError(message)
    else:
        torch._assert_async(condition, message)


def _sum(x: Tensor, group: distributed.ProcessGroup) -> Tensor:
    from torch.distributed import _functional_collectives as collectives  # rarely needed

    return wait(collectives.all_reduce(x, "sum", group))


def wait(x: Tensor) -> Tensor:
    """Wait for the result of a functional collective."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(x)  # type: ignore[no-untyped-call, no-any-return]
