"""A loss on the attention of a model: entropy, log-sum-exp and largest logits of every attention call."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from attnscale._util.checks import read_int, read_number
from attnscale._util.handles import Removable
from attnscale.backends import dispatch
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import padding_rows
from attnscale.call.tap import Run, Tap
from attnscale.diagnostics.monitor import find_attention
from attnscale.errors import ArgumentError, BackendError, reject
from attnscale.statistics import RowStats, StatsRequest

PARTS = ("target", "floor", "z", "hinge")
WEIGHT = "a finite number >= 0"
SHARE = "a number in 0 … 1, or one per head"


class AttentionLoss(Removable):
    """Collects the attention calls of a forward pass and returns one scalar to add to the training loss.

    The parts, each a mean over the attention calls of the forward pass:

    - `entropy` × (h − target)², `entropy` × max(0, floor − h)²: h is the mean of entropy / ln n over the rows of a
      head, 1 for uniform attention and 0 for one key per row. The mean over heads counts.
    - `z` × lse², the mean over rows and heads.
    - `hinge` × max(0, m − bound)²: m is the largest logit of a head over all rows. The mean over heads counts.

    Rows without visible keys and padding rows do not count. The forward pass of the model is unchanged: statistics come
    from a pass of their own, whose backward pass adds to the gradients of queries, keys, β, sinks and additive masks.
    Memory is linear in length. Call the object once after each forward pass of the model; a new forward pass discards
    the calls of the previous one. Works under DDP, FSDP2 (`fully_shard`), gradient accumulation, torch.compile, and
    activation checkpointing with `use_reentrant=False`, where recomputed calls do not count again.

    Args:
        model: a model with attnscale attention (`attnscale.convert`, `attnscale.hf.apply`, or its modules), or a
            transformers model with the "sdpa" attention implementation. A monitor must be attached first.
        entropy: weight of `target` and `floor`.
        target: the intended h of all heads, or one number per head.
        floor: the smallest h without a penalty, for all heads, or one number per head.
        z: weight of the squared lse.
        hinge: weight of the largest logits above `bound`.
        bound: the largest logit without a penalty.
        rows: number of sampled rows per call, new ones in every forward pass. None takes all rows, which `hinge` needs
            for the exact maximum.

    Attributes:
        parts: the value of each part at the last call, before its weight; detached.

    Raises:
        ArgumentError: a number is out of range, a weight has nothing to act on, the model has no attention that can be
            measured, or its sequence or heads are split over processes.
        ArgumentTypeError: `model` is not a torch.nn.Module, or a number is not one.

    Example:
        >>> import attnscale
        >>> model = nn.TransformerEncoderLayer(32, nhead=4, dropout=0.0, batch_first=True)
        >>> conversion = attnscale.convert(model, "constant")
        >>> with attnscale.AttentionLoss(model, entropy=0.1, floor=0.3, z=1e-4) as attention_loss:
        ...     loss = model(torch.randn(2, 16, 32)).square().mean() + attention_loss()
        ...     loss.backward()
        >>> sorted(attention_loss.parts)
        ['floor', 'z']
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        entropy: float = 0.0,
        target: float | Sequence[float] | None = None,
        floor: float | Sequence[float] | None = None,
        z: float = 0.0,
        hinge: float = 0.0,
        bound: float | None = None,
        rows: int | None = None,
    ) -> None:
        self.rows = None if rows is None else read_int("rows", rows, "an int >= 1 or None for all rows", least=1)
        weights = {name: _weight(name, x) for name, x in (("entropy", entropy), ("z", z), ("hinge", hinge))}
        self._target, self._floor = _share("target", target), _share("floor", floor)
        self._bound = None if bound is None else read_number("bound", bound)
        if (weights["entropy"] > 0.0) == (self._target is None and self._floor is None):
            reject("entropy", entropy, "a number > 0 together with target or floor, else 0")
        if (weights["hinge"] > 0.0) == (self._bound is None):
            reject("hinge", hinge, "a number > 0 together with bound, else 0")
        if not any(weights.values()):
            reject("entropy, z and hinge", (entropy, z, hinge), "at least one weight > 0")
        goals = (self._target, self._floor, weights["z"] or None, self._bound)
        of_parts = (weights["entropy"], weights["entropy"], weights["z"], weights["hinge"])
        named = zip(PARTS, of_parts, goals, strict=True)
        self._weights = {name: weight for name, weight, goal in named if goal is not None}
        self.parts: dict[str, Tensor] = {}
        self._collected: list[dict[str, Tensor]] = []
        self._passes = 0
        self._lost = False  # whether the last forward pass had no gradients and discarded calls that had
        with contextlib.ExitStack() as undo:
            found = find_attention(model, undo)
            if not found:
                reject(
                    "model",
                    type(model).__name__,
                    "a model with attnscale attention: call attnscale.convert(model, 'constant') or "
                    "attnscale.hf.apply, or use attnscale.ScaledDotProductAttention in its forward method",
                )
            for path, module in found.items():
                _refuse_split(path, module)
            for module in found.values():
                tap = _LossTap(self, vars(module).get("tap"))
                tap.attach(module)
                undo.callback(tap.take_off, module)
            handle = model.register_forward_pre_hook(_NewPass(self), prepend=True)
            undo.callback(handle.remove)
            self._undo = undo.pop_all()

    def __call__(self) -> Tensor:
        """Return the loss of the attention calls since the start of the last forward pass, and discard them.

        Returns:
            A scalar in fp32 or fp64, on the device of the first call.

        Raises:
            BackendError: no attention call was collected, or the collected ones have no gradients and replaced calls
                that have.
        """
        collected, lost = list(self._collected), self._lost
        self._collected.clear()
        self._lost = False
        if not collected:
            raise BackendError(
                "the attention loss has no attention call: expected a forward pass of the model since the last call, "
                "and attention modules that are still those the loss was created for"
            )
        if lost and torch.is_grad_enabled():
            raise BackendError(
                "the attention loss would have no gradients: the last forward pass ran under torch.no_grad and "
                "discarded the calls of the one before; call the loss after each forward pass of the training"
            )
        place = next(iter(collected[0].values()))
        values = {name: torch.stack([terms[name].to(place) for terms in collected]).mean() for name in self._weights}
        self.parts = {name: value.detach() for name, value in values.items()}
        total = torch.zeros_like(place)
        for name, weight in self._weights.items():
            total = total + weight * values[name]
        return total

    def remove(self) -> None:
        """Detach from the model, which is then as before. Idempotent."""
        self._collected.clear()
        self._undo.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are None: hooks and modules have a single owner."""
        return type(None), ()

    def begin(self) -> None:
        """A new forward pass of the model."""
        if not torch.compiler.is_compiling():
            waiting = self._lost or any(term.requires_grad for terms in self._collected for term in terms.values())
            self._lost = waiting and not torch.is_grad_enabled()
            self._passes += 1  # a compiled graph has one sample of rows
        self._collected.clear()

    def collect(self, call: AttentionCall) -> None:
        """Add the terms of a call, unless activation checkpointing repeats it.

        A repeated call is measured all the same: the backward pass needs the tensors that it saves.
        """
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _refuse_reentrant()
        terms = self._terms(call)
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self._collected.append(terms)

    def _terms(self, call: AttentionCall) -> dict[str, Tensor]:
        """The parts of a call, each a scalar."""
        wanted, entropy = self._weights, not {"target", "floor"}.isdisjoint(self._weights)
        request = StatsRequest(
            False, entropy, "z" in wanted, "hinge" in wanted, rows=self.rows, seed=self._passes, differentiable=True
        )
        stats = dispatch.statistics(call, request)
        seen = (stats.visible > 0) & ~_padding(call, stats)
        terms: dict[str, Tensor] = {}
        if entropy:
            share = _entropy_share(stats, seen)
            if self._target is not None:
                terms["target"] = (share - self._goal("target", self._target, share)).square().mean()
            if self._floor is not None:
                terms["floor"] = (self._goal("floor", self._floor, share) - share).relu().square().mean()
        if "z" in wanted:
            terms["z"] = torch.where(seen, stats.lse, 0.0).square().sum() / seen.sum().clamp(min=1)
        if self._bound is not None:
            largest = torch.where(seen, stats.max_logit, -math.inf).amax((0, 2))
            terms["hinge"] = (largest - self._bound).relu().square().mean()
        return terms

    def _goal(self, name: str, goal: tuple[float, ...], share: Tensor) -> Tensor:
        """A target or floor per head."""
        if len(goal) not in (1, share.shape[0]):
            reject(name, goal, f"one number, or one for each of {share.shape[0]} heads")
        return torch.tensor(goal, dtype=share.dtype, device=share.device)


class _LossTap(Tap):
    """Tap of a module: runs a call as before, reported to the previous tap, and passes it to the loss."""

    def __init__(self, loss: AttentionLoss, previous: Tap | None) -> None:
        super().__init__(_NO_LISTENER, self._report)
        self._loss, self.previous, self._active = loss, previous, True

    @property
    def open(self) -> bool:
        """Whether all calls must go through the tap."""
        return self._active

    @property
    def tracking(self) -> bool:
        """Whether calls go through the tap."""
        return self._active

    def take_off(self, module: Any) -> None:
        """Remove this tap from a module. Compiled graphs that contain it stop collecting."""
        self._active = False
        self.detach(module)

    def _report(self, tap_id: Tensor, call: AttentionCall, run: Run, measured: AttentionCall | None = None) -> Tensor:
        if measured is not None:
            raise BackendError(SPLIT)
        before = self.previous
        out = run(call).out if before is None or not before.tracking else before.report(before.id, call, run)
        self._loss.collect(call)
        return out


SPLIT = (
    "the attention loss does not support sequences or heads that are split over processes: use "
    "StatsRequest(differentiable=True) with attnscale.distributed.context_parallel_attention"
)


class _NoListener(NamedTuple):
    """The listener of a tap without reports."""

    listening: bool = False
    failed: bool = False
    tracking: bool = False
    limit: float = math.inf


_NO_LISTENER: Any = _NoListener()


class _NewPass:
    """Hook before the forward pass of the model. A copy of it, in a copy of the model, does nothing."""

    def __init__(self, loss: AttentionLoss) -> None:
        self._loss = loss

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        self._loss.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything and returns None


def _entropy_share(stats: RowStats, seen: Tensor) -> Tensor:
    """Mean of entropy / ln n over the rows of each head, [H]. A sink is one more key."""
    keys = stats.visible + int(stats.with_sink)
    counted = seen & (keys > 1)
    share = torch.where(counted, stats.entropy, 0.0) / keys.clamp(min=2).to(stats.entropy.dtype).log()
    return share.sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def _padding(call: AttentionCall, stats: RowStats) -> Tensor:
    """Padding rows, broadcastable to [B, H, Tq]."""
    rows = padding_rows(call.context)
    if rows is None:
        return torch.zeros((), dtype=torch.bool, device=call.query.device)
    return (rows if stats.rows is None else rows[:, stats.rows])[:, None]


def _refuse_split(path: str, module: nn.Module) -> None:
    if getattr(module, "spread", None) is not None or getattr(module, "head_part", (0, 1))[1] > 1:
        raise ArgumentError(f"{path} is not accepted: {SPLIT}")


def _refuse_reentrant() -> None:
    """Reject a call inside a reentrant checkpoint, whose forward pass has no graph."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise BackendError(
                "the attention loss does not support checkpoint(..., use_reentrant=True), whose forward pass has no "
                "gradients: pass use_reentrant=False"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _weight(name: str, value: object) -> float:
    weight = read_number(name, value, WEIGHT)
    if not 0.0 <= weight < math.inf:
        reject(name, value, WEIGHT)
    return weight


def _share(name: str, value: float | Sequence[float] | None) -> tuple[float, ...] | None:
    if value is None:
        return None
    given = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    shares = tuple(read_number(name, share, SHARE) for share in given)
    if not shares or not all(0.0 <= share <= 1.0 for share in shares):
        reject(name, value, SHARE)
    return shares
