"""β for every row of a call: the step from lengths to policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.context import Context
from attnscale.errors import ArgumentError
from attnscale.lengths import count_visible, find_positions, same_for_every_row
from attnscale.policies import FormulaPolicy, Policy
from attnscale.policies.adaptive import ScorePolicy
from attnscale.prepass import adaptive_temperature

_REMEMBERED = 8
_memory: WeakKeyDictionary[FormulaPolicy, OrderedDict[Hashable, Tensor]] = WeakKeyDictionary()


def temperature(policy: Policy, call: AttentionCall) -> float | Tensor:
    """β for every row: a float where all rows share it and the host knows it, else fp32 [B|1, H|1, Tq]."""
    context, query = call.context, call.query
    if policy.uniform is not None:
        return policy.uniform
    if isinstance(policy, ScorePolicy) and policy.needs_scores:
        return _checked(adaptive_temperature(policy, call), query)
    if not policy.needs_query and not torch.compiler.is_compiling() and context.positions is None:
        n = same_for_every_row(context)
        if n is not None:
            beta = policy(n, positions=_host_position(context))
            if beta.numel() == 1 and not beta.requires_grad and beta.device.type == "cpu":
                return float(beta)
    arguments = {"query": query} if policy.needs_query else {}
    return _checked(policy(count_visible(context), positions=find_positions(context), **arguments), query)


def plain_temperature(policy: FormulaPolicy, queries: int, keys: int, device: torch.device) -> Tensor:
    """The same for a call without any rule but causality, from memory where it is there.

    Such calls recur with every layer and step, and β would be a dozen small operations each time.
    """
    memory = _memory.get(policy)
    if memory is None:
        memory = _memory[policy] = OrderedDict()
    # A policy whose fields were changed is another key, and so is a tensor that autograd may not save.
    fields = map(policy.__dict__.get, policy.__dataclass_fields__)
    key = (queries, keys, device, torch.is_inference_mode_enabled(), *fields)
    beta = memory.get(key)
    if beta is None:
        context = Context(queries, keys, device, causal=True)
        beta = memory[key] = policy(count_visible(context), positions=find_positions(context))
        if len(memory) > _REMEMBERED:
            memory.popitem(last=False)
    return beta


def _host_position(context: Context) -> Tensor | None:
    if not context.causal or not isinstance(context.slot, int) or context.left is None:
        return None
    return torch.tensor(context.slot, device="cpu")


def _checked(beta: Tensor, query: Tensor) -> Tensor:
    """β [B|1, H|1, Tq]; a policy built for another number of heads is refused here, by name of the shapes."""
    while beta.dim() < 3:
        beta = beta[None]
    batch, heads, rows = query.shape[:3]
    if beta.shape[0] not in (1, batch) or beta.shape[1] not in (1, heads) or beta.shape[2] not in (1, rows):
        raise ArgumentError(
            f"policy gives β of shape {list(beta.shape)}, which is not accepted: expected one that broadcasts to "
            f"[B, H, Tq] = {[batch, heads, rows]}; was it built for another number of heads?"
        )
    return beta
