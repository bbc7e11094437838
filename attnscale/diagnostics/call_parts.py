"""An `AttentionCall` as the plain values that autograd can save and operators can take."""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context


class CallParts(NamedTuple):
    """What a listener gets of a call, detached: the tensors first, then the constants.

    This is the only list of them: the schema of the operators is made from it. Given positions and counts are left
    out, since they only decide β; dropout is not part of the statistics.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    slots: Tensor | None
    first: Tensor | None
    last: Tensor | None
    padding: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    slot: int
    causal: bool
    left: int | None
    right: int | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: AttentionCall) -> CallParts:
        """The parts of a call; `slot` counts where there are no `slots`."""
        call = call.detached()
        context, beta = call.context, call.beta
        if not isinstance(beta, Tensor):
            beta = torch.full((1, 1, 1), beta, device=call.query.device)
        slots, slot = (context.slot, 0) if isinstance(context.slot, Tensor) else (None, context.slot)
        tensors = slots, context.first, context.last, context.padding, context.mask, call.sinks
        constants = slot, context.causal, *context.window, call.scale, call.softcap
        return cls(call.query, call.key, call.value, beta, *tensors, *constants)

    def to_call(self) -> AttentionCall:
        """Inverse of `of`."""
        place = self.slot if self.slots is None else self.slots
        rules = self.causal, place, (self.left, self.right), self.first, self.last, self.padding, self.mask
        context = Context(self.query.shape[2], self.key.shape[2], self.query.device, *rules)
        return AttentionCall(*self[:3], context, self.scale, 0.0, self.softcap, self.sinks, self.beta)


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    int | None: "SymInt?",
    bool: "bool",
    float: "float",
    float | None: "float?",
}
_TYPES = {name: _SCHEMA_TYPES[hint] for name, hint in get_type_hints(CallParts).items()}
TENSORS = sum(kind.startswith("Tensor") for kind in _TYPES.values())
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())
