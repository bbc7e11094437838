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
        context, slot, beta = call.context, call.context.slot, call.beta
        return cls(
            query=call.query.detach(),
            key=call.key.detach(),
            value=call.value.detach(),
            beta=beta.detach() if isinstance(beta, Tensor) else torch.full((1, 1, 1), beta, device=call.query.device),
            slots=slot if isinstance(slot, Tensor) else None,
            first=context.first,
            last=context.last,
            padding=context.padding,
            mask=None if context.mask is None else context.mask.detach(),
            sinks=None if call.sinks is None else call.sinks.detach(),
            slot=0 if isinstance(slot, Tensor) else slot,
            causal=context.causal,
            left=context.window[0],
            right=context.window[1],
            scale=call.scale,
            softcap=call.softcap,
        )

    def to_call(self) -> AttentionCall:
        """Inverse of `of`."""
        context = Context(
            queries=self.query.shape[2],
            keys=self.key.shape[2],
            device=self.query.device,
            causal=self.causal,
            slot=self.slot if self.slots is None else self.slots,
            window=(self.left, self.right),
            first=self.first,
            last=self.last,
            padding=self.padding,
            mask=self.mask,
        )
        return AttentionCall(
            self.query, self.key, self.value, context, self.scale, 0.0, self.softcap, self.sinks, beta=self.beta
        )


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
