"""Tensors of one process among several: the part of a DTensor, and sums over a process group."""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed

from attnscale.errors import reject_type


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


class RowGroup:
    """The processes over which rows differ: `group`, or None for this process alone.

    Copies share the group. A pickled one is None, since a process group belongs to one run.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def sum_over_rows(x: Tensor, rows: RowGroup | None) -> Tensor:
    """The sum over the processes whose rows differ; over all processes where nothing was said of them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return x
    group = distributed.group.WORLD if rows is None else rows.group
    if group is None or distributed.get_world_size(group) == 1:
        return x
    from torch.distributed import _functional_collectives as collectives  # not needed in most programs

    return wait(collectives.all_reduce(x, "sum", group))


def wait(x: Tensor) -> Tensor:
    """What a functional collective gives, once it is there."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(x)  # type: ignore[no-untyped-call, no-any-return]
