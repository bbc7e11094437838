"""State that outlives a call: bounded result caches and reusable CPU buffers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched

# Larger tensors are not cached: recomputing them is cheap compared with the attention that uses them.
MOST_ELEMENTS = 2**18
# Larger buffers are not reused: allocation is cheap compared with attention over them.
MOST_BYTES = 32 * 2**20

Value = TypeVar("Value")
_NOTHING = object()


class Memory(Generic[Value]):
    """A bounded, thread-safe cache of the `most` newest results.

    The cache is bypassed under torch.compile, dispatch modes, functional transforms and CUDA graph capture: fake and
    traced tensors are useless outside, and cached ones would become constants inside. Only plain tensors without
    gradient, on the requested device, are cached. Entries are separate per inference mode (autograd cannot save
    inference tensors) and per CUDA stream (another stream could read a tensor before it is written).

    >>> memory = Memory(most=2)
    >>> [memory.recall(n, torch.device("cpu"), lambda: n * n) for n in (3, 3, 4, 5)], len(memory)
    ([9, 9, 16, 25], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._entries: dict[Hashable, Value] = {}

    def recall(self, key: Hashable, device: torch.device, make: Callable[[], Value]) -> Value:
        """Return the cached result of a key, or that of `make()`. It must not be modified in place."""
        if is_watched():
            return make()
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return make()
            stream = torch.cuda.current_stream(device).cuda_stream
        place = (key, device, stream, torch.is_inference_mode_enabled())
        found = self._entries.get(place, _NOTHING)  # atomic, needs no lock
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


class Scratch(threading.local):
    """A few CPU buffers per thread for tensors that are dead when a call returns.

    On the CPU, page faults of new memory cost more than the arithmetic: a copy of q at 2048 keys and 8 heads of 64
    takes a tenth of the attention time. Buffers are reused only if nothing can keep a reference: no autograd graph,
    tracing or transform.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Hashable, Tensor]] = {}

    def room(self, purpose: str, shape: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor in the dtype of `like`.

        It is valid until this thread's next request for the same purpose.
        """
        if like.device.type != "cpu" or math.prod(shape) * like.element_size() > MOST_BYTES or is_watched():
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        key = (shape, like.dtype, torch.is_inference_mode_enabled())
        found = self._buffers.get(purpose)
        if found is None or found[0] != key:
            found = self._buffers[purpose] = (key, torch.empty(shape, dtype=like.dtype, device="cpu"))
        return found[1]

    def clear(self) -> None:
        """Free this thread's buffers."""
        self._buffers.clear()
