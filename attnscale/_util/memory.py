"""Bounded, thread-safe memories of results that calls share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched

# Larger tensors are not stored: recomputing them is negligible beside the attention that uses them.
MOST_ELEMENTS = 2**18

Value = TypeVar("Value")
_NOTHING = object()


class Memory(Generic[Value]):
    """The `most` newest results, by key.

    The one guard of all memories: while torch.compile, a dispatch mode, a functional transform or a CUDA graph capture
    is active, nothing is stored or returned, since fake and traced tensors are useless outside and stored ones would
    become constants inside. Only ordinary tensors without a gradient, on the device asked for, are stored. Results are
    kept apart by inference mode (autograd may not save its tensors) and by CUDA stream (another stream could read them
    before they are written).

    >>> memory = Memory(most=2)
    >>> [memory.recall(n, torch.device("cpu"), lambda: n * n) for n in (3, 3, 4, 5)], len(memory)
    ([9, 9, 16, 25], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[Hashable, Value] = {}

    def recall(self, key: Hashable, device: torch.device, make: Callable[[], Value]) -> Value:
        """The stored result for a key, else that of `make()`; not to be changed in place."""
        if is_watched():
            return make()
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make()
            stream = torch.cuda.current_stream(device).cuda_stream
        place = (key, device, stream, torch.is_inference_mode_enabled())
        found = self._entries.get(place, _NOTHING)  # atomic, so no lock is needed
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
