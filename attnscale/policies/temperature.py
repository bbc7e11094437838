"""β for every row of a call: the step from lengths to policy."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from attnscale._util.memory import Memory
from attnscale._util.tracing import is_watched
from attnscale.backends.prepass import adaptive_temperature
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context
from attnscale.call.lengths import count_visible, find_positions, same_for_every_row
from attnscale.errors import ArgumentError
from attnscale.policies import FormulaPolicy, Policy
from attnscale.policies.adaptive import ScorePolicy

# β of formula policies by their identity and the rule that gives n: the layers and steps of a model ask for the same.
# A float is that of the one row of a decoding step; None says that β of one row is no number that the host knows.
_BETAS: Memory[Any] = Memory(most=64)
_HOST = torch.device("cpu")

_COUNT = "_attnscale_count"
_numbers = itertools.count()


def temperature(policy: Policy, call: AttentionCall) -> float | Tensor:
    """β for every row: a float where all rows share it and the host knows it, else fp32 [B|1, H|1, Tq]."""
    context, query = call.context, call.query
    if policy.uniform is not None:
        return policy.uniform
    if isinstance(policy, ScorePolicy) and policy.needs_scores:
        return _checked(adaptive_temperature(policy, call), query)
    if not policy.needs_query and context.positions is None and not is_watched():
        n = same_for_every_row(context)
        shared = None if n is None else _of_one_row(policy, n, _host_position(context))
        if shared is not None:
            return shared
        if isinstance(policy, FormulaPolicy) and context.visible is not None:
            return _checked(_of_counted(policy, context.visible), query)
        if isinstance(policy, FormulaPolicy) and context.is_causal_alone:
            return _checked(_of_causal(policy, context.queries, context.keys, context.device), query)
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
    """Say that an n will never be changed in place, so that β of it may be remembered; gives the same tensor back.

    Only for counts of our own that nobody else holds: a change through numpy, for one, leaves no trace on a tensor. The
    mark is an attribute of the tensor and dies with it.
    """
    setattr(visible, _COUNT, next(_numbers))
    return visible


def _of_causal(policy: FormulaPolicy, queries: int, keys: int, device: torch.device) -> Tensor:
    """β of a causal call; it would be a dozen small operations each time."""

    def make() -> Tensor:
        context = Context(queries, keys, device, causal=True)
        beta: Tensor = policy(count_visible(context), positions=find_positions(context))
        return beta

    if policy.identity is None:
        return make()
    remembered: Tensor = _BETAS.recall((policy.identity, "causal", queries, keys), device, make)
    return remembered


def _of_one_row(policy: Policy, n: int, position: int | None) -> float | None:
    """β as a number, where the host can know it."""

    def make() -> float | None:
        beta = policy(n, positions=None if position is None else torch.tensor(position, device="cpu"))
        known = beta.numel() == 1 and not beta.requires_grad and beta.device.type == "cpu"
        return float(beta) if known else None

    if not isinstance(policy, FormulaPolicy) or policy.identity is None:
        return make()
    remembered: float | None = _BETAS.recall((policy.identity, "one row", n, position), _HOST, make)
    return remembered


def _of_counted(policy: FormulaPolicy, visible: Tensor) -> Tensor:
    """β of an n that is given: remembered if `mark_counted` says that it cannot change."""

    def make() -> Tensor:
        beta: Tensor = policy(visible)
        return beta

    number = getattr(visible, _COUNT, None)
    if number is None or policy.identity is None:
        return make()
    remembered: Tensor = _BETAS.recall((policy.identity, "counted", number), visible.device, make)
    return remembered


def _host_position(context: Context) -> int | None:
    if not context.causal or not isinstance(context.slot, int) or context.left is None:
        return None
    return context.slot


def _checked(beta: Tensor, query: Tensor) -> Tensor:
    """β [B|1, H|1, Tq]; a policy built for another number of heads is refused here, by name of the shapes.

    In a compiled graph extents may be unknown until it runs, so that there the broadcasting itself is the check.
    """
    while beta.dim() < 3:
        beta = beta[None]
    batch, heads, rows = query.shape[:3]
    if torch.compiler.is_compiling():
        return beta
    if beta.shape[0] not in (1, batch) or beta.shape[1] not in (1, heads) or beta.shape[2] not in (1, rows):
        raise ArgumentError(
            f"policy gives β of shape {list(beta.shape)}, which is not accepted: expected one that broadcasts to "
            f"[B, H, Tq] = {[batch, heads, rows]}; was it built for another number of heads?"
        )
    return beta
