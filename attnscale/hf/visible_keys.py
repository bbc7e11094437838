"""How many keys each row sees under a mask, counted once per forward for all layers that share the mask."""

from __future__ import annotations

import contextlib
import weakref
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.tracing import is_watched
from attnscale.call.context import shown
from attnscale.policies.temperature import mark_counted

# A model has a few masks: full and sliding, encoder, decoder and cross attention.
_MOST_MASKS = 8


class _Counted(NamedTuple):
    """n of one version of a mask, and the module that it was counted for first."""

    mask: weakref.ref[Tensor]
    version: int
    module: weakref.ref[nn.Module]
    visible: Tensor


def visible_keys_of(mask: Tensor, module: nn.Module) -> Tensor:
    """n [B|1, H|1, Tq] of a mask [B, H|1, Tq, Tk]: the same tensor for every layer that is given the same mask.

    The module that counted first counts again at its next call, which is the next forward. So a mask that was changed
    in place is noticed, also in inference mode, where tensors have no version.
    """
    if is_watched():
        return _count(mask)  # the compiler merges equal counts
    version = -1 if mask.is_inference() else mask._version
    counted: list[_Counted] = getattr(state.HF_COUNTED_MASKS, "entries", [])
    for entry in counted:
        if entry.mask() is mask and entry.version == version and entry.module() is not module:
            return entry.visible
    # No inference tensor: a later forward outside of inference mode may be given the same mask.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        entry = _Counted(weakref.ref(mask), version, weakref.ref(module), mark_counted(_count(mask)))
    kept = [old for old in counted if old.mask() is not None and old.mask() is not mask]
    state.HF_COUNTED_MASKS.entries = [entry, *kept[: _MOST_MASKS - 1]]
    return entry.visible


def _count(mask: Tensor) -> Tensor:
    """n [B|1, H|1, Tq]; an axis along which the mask is broadcast is counted once."""
    for axis in (0, 1):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return shown(mask).sum(-1)
