"""Computes β for every row of a call from the number of visible keys, with a cache of β (`state.BETAS`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.tracing import is_watched
from attnscale.call.context import COUNTED, Context, count_visible, find_positions, same_for_every_row
from attnscale.policies.base import FormulaPolicy, Policy, check_beta

_HOST = torch.device("cpu")

Beta = TypeVar("Beta")


def temperature(policy: Policy, context: Context, query: Tensor) -> float | Tensor:
    """Return β from lengths: a float if all rows share it and it is known on the host, else [B|1, H|1, Tq].

    A policy with parameters or buffers is evaluated exactly once.
    """
    if policy.uniform is not None:
        return policy.uniform
    shared_n = None
    if not policy.needs_query and context.positions is None and not is_watched():
        shared_n = same_for_every_row(context)
        if shared_n is not None and not _has_tensors(policy):
            slot = context.slot if context.causal and context.left is not None else None
            beta = _of_one_row(policy, shared_n, slot if isinstance(slot, int) else None)
            if beta is not None:
                return beta
        if isinstance(policy, FormulaPolicy) and context.visible is not None:
            return check_beta(_of_counted(policy, context.visible), query)
        if isinstance(policy, FormulaPolicy) and context.is_causal_alone:
            return check_beta(_of_causal(policy, context.queries, context.keys, context.device), query)
    rows = _of_lengths(policy, context, **({"query": query} if policy.needs_query else {}))
    shared = None if shared_n is None else _as_number(rows)
    return check_beta(rows, query) if shared is None else shared


def recurring_temperature(
    policy: FormulaPolicy, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, visible: Tensor | None
) -> float | Tensor | None:
    """Return the cached β of calls that recur in every layer and step; None for other calls.

    Recurring calls are: causal without a mask; a single row that sees all keys; and a bool mask with a given n.
    """
    batch, heads, rows, _ = query.shape
    keys = key.shape[-2]
    if visible is None and mask is None and rows == 1:
        return _of_one_row(policy, min(1, keys) if is_causal else keys, None)
    if visible is None and mask is None and is_causal:
        return _of_causal(policy, rows, keys, query.device)
    if visible is None or mask is None or mask.dtype != torch.bool:
        return None
    fits = visible.dim() == 3 and visible.dtype == torch.int64 and visible.shape[2] == rows
    if fits and visible.shape[0] in (1, batch) and visible.shape[1] in (1, heads):
        return _of_counted(policy, visible)
    return None


def mark_counted(visible: Tensor) -> Tensor:
    """Declare that an n is never modified in place, so that its β may be cached; returns the same tensor.

    Only for tensors that no other code holds, because modifications through numpy are not detected. The mark is an
    attribute of the tensor.
    """
    setattr(visible, COUNTED, next(state.COUNT_NUMBERS))
    return visible


def _of_lengths(policy: Policy, context: Context, **query: Tensor) -> Tensor:
    return policy(count_visible(context), positions=find_positions(context), **query)


def _of_causal(policy: FormulaPolicy, queries: int, keys: int, device: torch.device) -> Tensor:
    rule = ("causal", queries, keys)
    return _remembered(policy, rule, device, lambda: _of_lengths(policy, Context(queries, keys, device, causal=True)))


def _of_one_row(policy: Policy, n: int, position: int | None) -> float | None:
    """Return β as a number; None if the host does not know it or heads differ."""

    def make() -> float | None:
        return _as_number(policy(n, positions=None if position is None else torch.tensor(position, device="cpu")))

    return _remembered(policy, ("one row", n, position), _HOST, make)


def _of_counted(policy: Policy, visible: Tensor) -> Tensor:
    """Return β of a given n, cached if `mark_counted` declared it immutable."""
    number = getattr(visible, COUNTED, None)
    if number is None:
        return policy(visible)
    return _remembered(policy, ("counted", number), visible.device, lambda: policy(visible))


def _remembered(policy: Policy, rule: tuple[Hashable, ...], device: torch.device, make: Callable[[], Beta]) -> Beta:
    """Return `make()`, cached if β depends only on the policy's `identity` and the rule that gives n."""
    identity = policy.identity if isinstance(policy, FormulaPolicy) else None
    if identity is None:
        return make()
    beta: Beta = state.BETAS.recall((identity, *rule), device, make)
    return beta


def _as_number(beta: Tensor) -> float | None:
    known = beta.numel() == 1 and not beta.requires_grad and beta.device.type == "cpu"
    return float(beta) if known else None


def _has_tensors(policy: Policy) -> bool:
    """Whether a policy or one of its parts has parameters or buffers."""
    if isinstance(policy, FormulaPolicy) or not isinstance(policy, nn.Module):
        return False
    return any(True for _ in policy.parameters()) or any(True for _ in policy.buffers())
