"""The listener at the tap of one attention layer: measures its calls between two reports.

Three questions decide what is measured: which rows count (those whose own token is padding do not), which call of the
forward pass a backward belongs to, and whether its tensors have changed in between.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall
from attnscale.call.context import Context, shown
from attnscale.call.tap import CallEvent
from attnscale.diagnostics.alerts import Notices
from attnscale.diagnostics.records.tally import Tally, salt_of
from attnscale.statistics import sample_rows
from attnscale.statistics.rows.quantities import (
    MeasuredQuantities,
    angle_parts,
    backward_quantities,
    compared_quantities,
    forward_quantities,
    measure_quantities,
    score_gradients,
)

# The number of a call that is not known.
UNKNOWN = -1
# Calls whose backward is waited for; of more, the first are forgotten.
UNANSWERED = 64
# Numbers of calls that are held apart because they may turn out to be of training.
UNDECIDED = 2**18
# Numbers of a gradient whose norms are taken at a time: they may have to be widened.
NUMBERS = 2**20


class TensorIdentity(Uncopied):
    """Remembers tensors without keeping their memory; autograd's version counter tells whether they were changed.

    >>> import torch
    >>> x = torch.zeros(3)
    >>> identity = TensorIdentity(x)
    >>> identity.matches(x.detach()), identity.matches(x.clone()), identity.matches(x.add_(1))
    (True, False, False)
    """

    def __init__(self, *tensors: Tensor) -> None:
        # The weak reference keeps the storage's address from being given to another.
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]  # type: ignore[no-untyped-call]
        self._marks = [_mark(x) for x in tensors]

    def matches(self, *tensors: Tensor) -> bool:
        """Whether these are the same, one by one."""
        return self._marks == [_mark(x) for x in tensors]


def _mark(x: Tensor) -> tuple[object, ...]:
    version = None if x.is_inference() else x._version  # a tensor of inference mode has none, and no backward either
    return x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset(), version


class Origins:
    """Which call of the forward pass is repeated by a call inside backward.

    A reentrant checkpoint runs its forward without a graph, and once more inside backward with one, so that no graph
    leads from the second run to the first. Autograd numbers its nodes in the order in which they are made. The node of
    the checkpoint is made before its forward runs: the calls it holds are the first that come after its number. So the
    calls of the layer that were made without a graph are kept, with autograd's count at the time.
    """

    def __init__(self, most: int) -> None:
        self._forwards: deque[tuple[int, int]] = deque(maxlen=most)  # count of nodes by then, number of the call
        self._forgotten = -1  # the count of the last one that was dropped
        self._repeats: list[tuple[int, int]] = []  # the same of calls that were repeated without a graph in turn
        self._run: object = None  # of a checkpoint inside backward
        self._left: list[int] = []  # the calls that this run has not repeated yet, the next one last

    def add(self, number: int) -> None:
        """A call in forward."""
        if len(self._forwards) == self._forwards.maxlen:
            self._forgotten = self._forwards[0][0]
        self._forwards.append((torch._C._autograd._get_sequence_nr(), number))

    def repeated(self, graph: bool) -> int:
        """The number of the call that the one being made inside backward repeats, with a graph or, in nested
        checkpoints, without; UNKNOWN where that cannot be told.
        """
        node = torch._C._current_autograd_node()
        # The backward of a compiled graph may compute calls again too, but has no node of its own for each of them.
        if node is None or node.name() == "CompiledFunctionBackward":
            return UNKNOWN
        start = node._sequence_nr()
        run = torch._C._current_graph_task_id(), start
        if self._run != run:
            # Calls that were made after the node; if that was made inside backward, calls repeated there.
            later = [number for count, number in self._repeats if count > start]
            if not later and self._forgotten <= start:
                later = [number for count, number in self._forwards if count > start]
            self._run, self._left = run, later[::-1]
        number = self._left.pop() if self._left else UNKNOWN
        if not graph and number != UNKNOWN:
            self._repeats.append((torch._C._autograd._get_sequence_nr(), number))
        return number

    def answered(self, number: int) -> None:
        """Backward has come to a call: what repeated it is done."""
        self._repeats = [repeat for repeat in self._repeats if repeat[1] != number]


class MeasuredCall(NamedTuple):
    """A call that was measured in forward and whose backward may still come."""

    sources: TensorIdentity
    measures: MeasuredQuantities  # of its sampled rows
    tally: Tally  # where it was counted
    salt: int  # of the keys of its rows


class LayerListener(Uncopied):
    """Collects the rows of a layer's calls, over micro-batches and however many calls there are.

    A call belongs to training if gradients were enabled and the module was in training mode, or if backward has come
    to it: that of a reentrant checkpoint runs without gradients. All others are evaluation, and reported only where
    there was no training. With `capture`, rows of the last call are kept, for the dump of an alert.
    """

    def __init__(self, name: str, rows: int | None, capture: bool, module: nn.Module, notices: Notices) -> None:
        self.name = name
        self.rows = rows
        self.capture = capture
        self._module = module
        self._notices = notices
        self.listening = False
        self.seed = 0  # of the rows that are sampled: the same in all processes
        self.rank = 0
        self._number = 0  # of the last call: never given again, so that a late backward finds no other call
        self.reset()

    def reset(self) -> None:
        """Forget all calls."""
        self.failed = False
        self.training, self.evaluation = Tally(), Tally()
        self._unanswered: OrderedDict[int, MeasuredCall] = OrderedDict()  # by number
        self._origins = Origins(UNANSWERED)
        self.captured: dict[str, Tensor] = {}
        self._captured_rank = 0
        self._padding_rows: Tensor | None = None  # of the last call in backward

    def tally(self) -> Tally:
        """What is reported: the calls of training if there were any."""
        for call in self._unanswered.values():
            self._decide(call, self.evaluation)
        if self.training.backward is not None and self.training.forward is None:
            # Backward came to calls that could not be told from evaluation: a model trained in evaluation mode.
            self.training.absorb(self.evaluation)
        return self.training if self.training.heads else self.evaluation

    def begin(self, graph: bool) -> int:
        """The number of a call, or of the one that a checkpoint repeats inside backward."""
        if torch._C._current_graph_task_id() != -1:
            return self._origins.repeated(graph)
        self._number += 1
        return self._number

    def forward(self, event: CallEvent, number: int) -> None:
        """Measure the sampled rows of a call."""
        if _is_empty(event.call):
            return
        trained = self._module.training
        answerable = (trained or event.graph) and number != UNKNOWN
        tally = self.training if trained and event.graph else Tally() if answerable else self.evaluation
        rows = self._sampled(event.call)
        call = without_padding(event.call)[0].select(rows)
        measures, salt = measure_quantities(call), salt_of(self.seed, self.rank, number)
        tally.add_forward(forward_quantities(measures, call.row_beta()), salt)
        before, after = angle_parts(call, event.out.index_select(2, rows), measures.visible > 0)
        tally.note(broken_row=_first_broken(event.out), angle_in=before.sum(0), angle_out=after.sum(0))
        if answerable:
            sources = TensorIdentity(*_sources(event.call))
            self._remember(MeasuredCall(sources, measures, tally, salt), number, event.graph)
        rank = answerable + (tally is self.training)
        if self.capture and rank >= self._captured_rank:  # evaluation does not replace training
            self._captured_rank = rank
            slots = call.context.slots().clamp(0, event.call.key.shape[2] - 1)[0]
            self.captured = {"rows": rows, "query": call.query.clone(), "key": event.call.key[:, :, slots]}

    def backward(self, call: AttentionCall, gradient: Tensor, number: int) -> None:
        """Measure the gradients of the same rows, and whether their scores are what they were in forward.

        Scores of the same tensors as in forward are not measured again.
        """
        if _is_empty(call):
            return
        rows, sources = self._sampled(call), _sources(call)
        call, self._padding_rows = without_padding(call)
        call = call.select(rows)
        self.training.note(output_gradient=_squares(blank(gradient, self._padding_rows)))
        self._origins.answered(number)
        past = self._unanswered.pop(number, None)  # None also where backward comes once more
        if past is None:
            self._number += 1  # rows of their own, as far as is known
            measures, salt = measure_quantities(call), salt_of(self.seed, self.rank, self._number)
        else:
            self._decide(past, self.training)
            measures, salt = past.measures, past.salt
            difference = torch.zeros(gradient.shape[1], device=gradient.device)
            if not past.sources.matches(*sources):
                measures = measure_quantities(call)
                change = (compared_quantities(measures) - compared_quantities(past.measures)).abs()
                difference = change.nan_to_num().amax((0, 1, 3))
            self.training.note(mismatch=difference)
        gradients = score_gradients(call, gradient.index_select(2, rows), measures)
        self.training.add_backward(backward_quantities(measures, call.row_beta(), gradients), salt)

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Squared norms per query head; a key head that several share is divided among them."""
        if 0 in (*query.shape[:3], *key.shape[:3]):
            return
        group = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = (_squares(x) for x in (blank(query, self._padding_rows), key, value))
        if group > 1:
            of_key, of_value = ((x / group).repeat_interleave(group) for x in (of_key, of_value))
        self.training.note(query_gradient=of_query, key_gradient=of_key, value_gradient=of_value)

    def skip(self, call: AttentionCall, reason: str) -> None:
        """Count a call that cannot be listened to, and say why, once."""
        self._notices.add(reason, f"{self.name} was not listened to in a call: {reason}")
        self.training.note(skipped_calls=torch.ones(call.query.shape[1], device=call.query.device))

    def give_up(self, error: Exception) -> None:
        """Stop listening until the next report."""
        self.failed = True
        self._notices.add_error(f"a listener failed and hears no more of this step, that of {self.name}", error)

    def _remember(self, call: MeasuredCall, number: int, graph: bool) -> None:
        """Keep a call for its backward. What has to give way is of evaluation, unless it is known to be of training."""
        self._unanswered[number] = call
        if not graph:
            self._origins.add(number)
        held = sum(one.tally.numbers for one in self._unanswered.values() if one.tally is not self.training)
        while len(self._unanswered) > UNANSWERED or (held > UNDECIDED and len(self._unanswered) > 1):
            _, first = self._unanswered.popitem(last=False)
            held -= first.tally.numbers if first.tally is not self.training else 0
            self._decide(first, self.evaluation)

    def _decide(self, call: MeasuredCall, tally: Tally) -> None:
        """Add a call that was held apart to training, or to evaluation."""
        if call.tally is not self.training:
            tally.absorb(call.tally)

    def _sampled(self, call: AttentionCall) -> Tensor:
        queries, device = call.query.shape[2], call.query.device
        return sample_rows(queries, queries if self.rows is None else self.rows, self.seed, device)


def _is_empty(call: AttentionCall) -> bool:
    """Whether there is no row that sees anything: no sequence, head, query or key."""
    return 0 in (*call.query.shape[:3], call.key.shape[2])


def _sources(call: AttentionCall) -> list[Tensor]:
    """What scores and logits are computed from."""
    mask = call.context.mask
    return [call.query, call.key, call.row_beta(), *([] if mask is None else [mask])]


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each head of [B, H, T, D]; row by row first, for which no copy is made."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = torch.split(x, max(1, NUMBERS // max(1, x[:, :, :1].numel())), dim=2)
    norms = (torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts)
    total: Tensor = reduce(torch.add, (of_part.square_().sum((0, 2)) for of_part in norms))
    return total


def _first_broken(out: Tensor) -> Tensor:
    """Per head the first row that holds a NaN or an infinity, −1 if none."""
    # The usual case without a wide copy of the output; on other devices reading the sum back would synchronise.
    if out.device.type == "cpu" and math.isfinite(float(out.sum())):
        return torch.full(out.shape[1:2], -1, device=out.device)
    broken = (~torch.isfinite(out.sum(-1, dtype=torch.promote_types(out.dtype, torch.float32)))).any(0)  # [H, Tq]
    return torch.where(broken.any(-1), broken.to(torch.uint8).argmax(-1), -1)


def padding_rows(context: Context) -> Tensor | None:
    """True [B|1, Tq] where a row's own key is padding; None where the rules hide no key from all rows.

    The key in a row's own slot is padding if `padding` says so, or if the mask hides it from every row and head. A mask
    under which rows do not see themselves although others see them (strictly causal ones) says nothing about padding:
    it hides the last key from all rows, and yet that key is real. A row without a slot among the keys, as in cross
    attention, is never padding.
    """
    if context.padding is None and context.mask is None:
        return None
    if isinstance(context.slot, int) and context.slot >= context.keys:
        return None
    # Where every key has a row, slots that were looked up from positions would pass over the padded ones.
    aligned = context.queries == context.keys
    slots = torch.arange(context.keys, device=context.device)[None] if aligned else context.slots()
    own = slots.clamp(0, max(context.keys - 1, 0))
    inside = own == slots
    padded = None if context.padding is None else _at(context.padding, own) & inside
    masked = None if context.mask is None else _hidden_by_mask(context.mask, own, inside)
    return masked if padded is None else padded if masked is None else padded | masked


def without_padding(call: AttentionCall) -> tuple[AttentionCall, Tensor | None]:
    """The same call with no visible key for padding rows, so that no aggregate contains them; and `padding_rows`."""
    context = call.context
    rows = padding_rows(context)
    if rows is None:
        return call, None
    first = torch.zeros_like(rows, dtype=torch.int64) if context.first is None else context.first
    last = torch.where(rows, first, context.keys if context.last is None else context.last)
    return replace(call, context=replace(context, first=first.expand_as(last), last=last)), rows


def blank(x: Tensor, rows: Tensor | None) -> Tensor:
    """[B, H, Tq, D] with zeros in the given rows [B|1, Tq]."""
    return x if rows is None else x.masked_fill(rows[:, None, :, None], 0.0)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """x [B|1, Tk] at slots [B|1, Tq], as [B|1, Tq]."""
    batch = max(x.shape[0], slots.shape[0])
    return x.expand(batch, -1).gather(-1, slots.expand(batch, -1))


def _hidden_by_mask(mask: Tensor, own: Tensor, inside: Tensor) -> Tensor | None:
    """True [B|1, Tq] where the mask [B|1, H|1, Tq, Tk] hides a row's own key from every row; None where it hides none.

    On the CPU the rows' own entries are read first: in most masks every row sees itself, and they are far less to read
    than the whole mask. On other devices reading the answer back would synchronise.
    """
    at = own[:, None, :, None].expand(max(mask.shape[0], own.shape[0]), mask.shape[1], -1, 1)
    sees_itself = shown(mask.expand(at.shape[0], -1, -1, -1).gather(-1, at)).squeeze(-1).any(1)  # [B|1, Tq]
    if mask.device.type == "cpu" and bool(sees_itself.all()):
        return None
    for axis in (0, 1, 2):
        if mask.stride(axis) == 0:  # repeated by broadcasting
            mask = mask.narrow(axis, 0, 1)
    seen = _at(shown(mask).any(2).any(1), own)  # by some row, [B|1, Tq]
    hidden = ~seen & inside
    telling = (sees_itself | ~seen | ~inside).all(-1, keepdim=True)
    return hidden & telling
