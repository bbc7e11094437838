"""How many keys each row sees, counted once a forward however many layers share the mask."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnscale._util.tracing import is_watched
from attnscale.call.context import shown
from attnscale.policies.temperature import mark_counted

# A model has a few masks: full and sliding, encoder, decoder and cross attention.
_REMEMBERED = 8


class Counted(NamedTuple):
    """What was counted, at which version of which mask, and for which module first."""

    mask: weakref.ref[Tensor]
    version: int
    module: weakref.ref[nn.Module]
    visible: Tensor


class _Memory(threading.local):
    def __init__(self) -> None:
        self.entries: list[Counted] = []


_memory = _Memory()


def visible_keys_of(mask: Tensor, module: nn.Module) -> Tensor:
    """n [B|1, H|1, Tq] of a mask [B, H|1, Tq, Tk]: the same tensor for every layer that is given the same mask.

    The module that counted first counts again when it comes back, which is the next forward: a mask that was changed
    in place meanwhile is noticed, also in inference mode, where tensors have no version.
    """
    if is_watched():
        return count(mask)  # in a compiled graph equal counts become one
    version = -1 if mask.is_inference() else mask._version
    for entry in _memory.entries:
        if entry.mask() is mask and entry.version == version and entry.module() is not module:
            return entry.visible
    # An ordinary tensor, as a forward outside of inference mode may be given the same mask.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        entry = Counted(weakref.ref(mask), version, weakref.ref(module), mark_counted(count(mask)))
    kept = [old for old in _memory.entries if old.mask() is not None and old.mask() is not mask]
    _memory.entries = [entry, *kept[: _REMEMBERED - 1]]
    return entry.visible


def count(mask: Tensor) -> Tensor:
    """n [B|1, H|1, Tq]; what a mask repeats by broadcasting is counted once."""
    for axis in (0, 1):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return shown(mask).sum(-1)
