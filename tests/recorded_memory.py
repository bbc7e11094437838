"""Recorded reads and writes of each program of a launch in Triton's interpreter, to find races and out-of-bounds reads.

Addresses are those of elements. TMA descriptors load and store through the same two functions as pointers. Atomics are
not supported and raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = np.ndarray


class Recorded:
    """The accesses of one launch: addresses and programs."""

    def __init__(self, programs: int, order: np.random.Generator | None) -> None:
        self.order = np.arange(programs) if order is None else order.permutation(programs)
        self.program = -1
        self._accesses: dict[str, list[tuple[int, Array]]] = {"read": [], "written": []}

    def note(self, kind: str, pointers: TensorHandle, mask: TensorHandle) -> None:
        where, shown = np.broadcast_arrays(pointers.data, mask.data)
        self._accesses[kind].append((self.program, where[shown.astype(bool)].ravel()))

    def accesses(self, kind: str) -> tuple[Array, Array]:
        """Addresses read or written, with repetitions, and the program of each access."""
        several = self._accesses[kind]
        addresses = np.concatenate([where for _, where in several]) if several else np.empty(0, np.uint64)
        programs = np.repeat([program for program, _ in several], [where.size for _, where in several])
        return addresses, programs


@contextmanager
def recording(order: np.random.Generator | None = None) -> Iterator[list[Recorded]]:
    """Record the launches inside, with one-dimensional grids and programs in the given random order."""
    launches: list[Recorded] = []
    own = {name: getattr(InterpreterBuilder, name) for name in ("set_grid_dim", "set_grid_idx")}
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def set_grid_dim(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        assert y == z == 1
        launches.append(Recorded(x, order))
        own["set_grid_dim"](builder, x, y, z)

    def set_grid_idx(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        launches[-1].program = int(launches[-1].order[x])
        own["set_grid_idx"](builder, launches[-1].program, y, z)

    def masked_load(builder: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *others: Any) -> Any:
        launches[-1].note("read", pointers, mask)
        return load(builder, pointers, mask, *others)

    def masked_store(
        builder: InterpreterBuilder, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *others: Any
    ) -> Any:
        launches[-1].note("written", pointers, mask)
        return store(builder, pointers, value, mask, *others)

    def atomic(*_: Any) -> None:
        raise AssertionError("an atomic operation")

    methods = {
        "set_grid_dim": set_grid_dim,
        "set_grid_idx": set_grid_idx,
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "create_atomic_rmw": atomic,
        "create_atomic_cas": atomic,
    }
    with mock.patch.multiple(InterpreterBuilder, **methods):
        yield launches


def assert_no_race(launch: Recorded, outputs: list[Tensor]) -> None:
    """Every output element is written once, nothing else is written, and no program reads what another writes."""
    written, writers = launch.accesses("written")
    places, index, times = np.unique(written, return_index=True, return_counts=True)
    assert (times == 1).all(), f"{(times > 1).sum()} elements are written more than once"
    expected = np.unique(np.concatenate([_addresses(x) for x in outputs]))
    assert np.isin(expected, places).all(), f"{(~np.isin(expected, places)).sum()} elements are not written"
    assert np.isin(places, expected).all(), f"{(~np.isin(places, expected)).sum()} other elements are written"
    read, readers = launch.accesses("read")
    at = np.searchsorted(places, read).clip(max=max(len(places) - 1, 0))
    foreign = (places[at] == read) & (writers[index][at] != readers)
    assert not foreign.any(), f"{foreign.sum()} reads of what another program writes"


def assert_reads_inside(launch: Recorded, tensors: list[Tensor]) -> None:
    """Only elements of these tensors are read."""
    read = np.unique(launch.accesses("read")[0])
    outside = ~np.isin(read, np.concatenate([_addresses(x) for x in tensors]))
    assert not outside.any(), f"{outside.sum()} elements outside of the arguments are read"


def is_read(launch: Recorded, x: Tensor) -> Tensor:
    """The elements of a tensor that are read."""
    return torch.from_numpy(np.isin(_addresses(x), launch.accesses("read")[0])).view(x.shape)


def _addresses(x: Tensor) -> Array:
    """Addresses of all elements."""
    offsets = torch.zeros((), dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        steps = torch.arange(size) * stride
        offsets = offsets + steps.view(*(-1 if i == axis else 1 for i in range(x.ndim)))
    return (x.data_ptr() + offsets * x.element_size()).flatten().numpy().astype(np.uint64)
