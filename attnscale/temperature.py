"""β for every row of a call: the step from lengths to policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attnscale.backends.call import AttentionCall
from attnscale.context import Context
from attnscale.errors import ArgumentError
from attnscale.lengths import count_visible, find_positions, same_for_every_row
from attnscale.policies import FormulaPolicy, Policy
from attnscale.policies.adaptive import ScorePolicy
from attnscale.prepass import adaptive_temperature

_REMEMBERED = 8
_memory: WeakKeyDictionary[FormulaPolicy, OrderedDict[Hashable, Tensor]] = WeakKeyDictionary()
_of_one_row: OrderedDict[Hashable, float | None] = OrderedDict()
_of_given: MutableMapping[Tensor, dict[Hashable, Tensor]] = WeakTensorKeyDictionary()


def temperature(policy: Policy, call: AttentionCall) -> float | Tensor:
    """β for every row: a float where all rows share it and the host knows it, else fp32 [B|1, H|1, Tq]."""
    context, query = call.context, call.query
    if policy.uniform is not None:
        return policy.uniform
    if isinstance(policy, ScorePolicy) and policy.needs_scores:
        return _checked(adaptive_temperature(policy, call), query)
    if not policy.needs_query and not torch.compiler.is_compiling() and context.positions is None:
        n = same_for_every_row(context)
        shared = None if n is None else _temperature_of_one_row(policy, n, _host_position(context))
        if shared is not None:
            return shared
        if isinstance(policy, FormulaPolicy) and context.visible is not None:
            return _checked(_temperature_of_given(policy, context.visible), query)
        if isinstance(policy, FormulaPolicy) and context.is_causal_alone:
            return _checked(_plain_temperature(policy, context.queries, context.keys, context.device), query)
    arguments = {"query": query} if policy.needs_query else {}
    return _checked(policy(count_visible(context), positions=find_positions(context), **arguments), query)


def short_temperature(
    policy: FormulaPolicy, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, visible: Tensor | None
) -> float | Tensor | None:
    """The same for the calls that recur with every layer and step, from memory; None for any other call.

    These are: causal without a mask; one row that sees all keys; and a bool mask whose n the caller has counted.
    """
    batch, heads, rows, _ = query.shape
    keys = key.shape[-2]
    if visible is None and mask is None and rows == 1:
        return _temperature_of_one_row(policy, min(1, keys) if is_causal else keys, None)
    if visible is None and mask is None and is_causal:
        return _plain_temperature(policy, rows, keys, query.device)
    if visible is None or mask is None or mask.dtype != torch.bool:
        return None
    fits = visible.dim() == 3 and visible.dtype == torch.int64 and visible.shape[2] == rows
    if fits and visible.shape[0] in (1, batch) and visible.shape[1] in (1, heads):
        return _temperature_of_given(policy, visible)
    return None


def _plain_temperature(policy: FormulaPolicy, queries: int, keys: int, device: torch.device) -> Tensor:
    """β of a causal call; it would be a dozen small operations each time."""
    memory = _memory.get(policy)
    if memory is None:
        memory = _memory[policy] = OrderedDict()
    # A tensor that autograd may not save is another one.
    key = (queries, keys, device, torch.is_inference_mode_enabled(), *_fields(policy))
    beta = memory.get(key)
    if beta is None:
        context = Context(queries, keys, device, causal=True)
        beta = memory[key] = policy(count_visible(context), positions=find_positions(context))
        if len(memory) > _REMEMBERED:
            memory.popitem(last=False)
    return beta


def _temperature_of_one_row(policy: Policy, n: int, position: int | None) -> float | None:
    """β as a number, where the host can know it; remembered, since the layers of a decoding step ask for the same."""
    formula = isinstance(policy, FormulaPolicy)
    key = (policy.name, n, position, *_fields(policy)) if isinstance(policy, FormulaPolicy) else ()
    if formula and key in _of_one_row:
        return _of_one_row[key]
    beta = policy(n, positions=None if position is None else torch.tensor(position, device="cpu"))
    known = beta.numel() == 1 and not beta.requires_grad and beta.device.type == "cpu"
    shared = float(beta) if known else None
    if formula:
        _of_one_row[key] = shared
        if len(_of_one_row) > _REMEMBERED:
            _of_one_row.popitem(last=False)
    return shared


def _temperature_of_given(policy: FormulaPolicy, visible: Tensor) -> Tensor:
    """β of an n that the caller counted, remembered as long as that tensor lives: layers share it."""
    beta: Tensor
    if visible.is_inference():  # and so without a version that would tell of changes
        beta = policy(visible)
        return beta
    key: tuple[Hashable, ...] = (policy.name, visible._version, torch.is_inference_mode_enabled(), *_fields(policy))
    known = _of_given.setdefault(visible, {})
    if key not in known:
        known[key] = policy(visible)
    return known[key]


def _fields(policy: FormulaPolicy) -> tuple[Hashable, ...]:
    """A policy whose fields were changed is another one."""
    return tuple(map(policy.__dict__.get, policy.__dataclass_fields__))


def _host_position(context: Context) -> int | None:
    if not context.causal or not isinstance(context.slot, int) or context.left is None:
        return None
    return context.slot


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
