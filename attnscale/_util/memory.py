"""Results that calls share because making them again costs more than finding them: bounded, locked and guarded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched

# Tensors with more elements are made afresh: the attention that uses them takes so long that this does not show.
MOST_ELEMENTS = 2**18

Value = TypeVar("Value")
_NOTHING = object()


class Memory(Generic[Value]):
    """The `most` results that were made last, by key; any thread may ask.

    Nothing is stored or given out while torch.compile, a dispatch mode, a functional transform or the capture of a CUDA
    graph is active: what is made there (fake tensors, traced ones, memory of the graph) is of no use outside, and what
    was made outside would be a constant there. A tensor is stored only if it is an ordinary one on the device asked for
    and carries no gradient. Tensors of inference mode, which autograd may not save, are kept apart, and so are those of
    each CUDA stream, which another stream could read before they are written.

    >>> memory = Memory(most=2)
    >>> [memory.recall(n, torch.device("cpu"), lambda: n * n) for n in (3, 3, 4, 5)], len(memory)
    ([9, 9, 16, 25], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[Hashable, Value] = {}

    def recall(self, key: Hashable, device: torch.device, make: Callable[[], Value]) -> Value:
        """What was made for this key, or what `make` makes of it now; not to be changed in place."""
        if is_watched():
            return make()
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make()
            stream = torch.cuda.current_stream(device).cuda_stream
        place = (key, device, stream, torch.is_inference_mode_enabled())
        found = self._entries.get(place, _NOTHING)  # one operation, and so without the lock
        if found is not _NOTHING:
            return found  # type: ignore[return-value]
        made = make()
        if _is_ordinary(made, device):
            with self._lock:
                self._entries[place] = made
                while len(self._entries) > self._most:
                    del self._entries[next(iter(self._entries))]  # the oldest
        return made

    def __len__(self) -> int:
        return len(self._entries)


def _is_ordinary(made: object, device: torch.device) -> bool:
    if isinstance(made, tuple):
        return all(_is_ordinary(part, device) for part in made)
    if not isinstance(made, Tensor):
        return True
    return type(made) is Tensor and made.device == device and not made.requires_grad and made.numel() <= MOST_ELEMENTS
