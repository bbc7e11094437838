"""The listener of one attention layer: measures its calls between two reports, and tracks the largest logits.

It excludes padding rows, matches each backward pass with its forward call, and detects tensors that changed in between.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attnscale._util.handles import Uncopied
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import CallEvent
from attnscale.diagnostics.delivery import Notices
from attnscale.diagnostics.records.tally import Tally, row_keys, salt_of
from attnscale.diagnostics.tracking import Faults, LogitTracker, bound_largest, squares
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

# Call number if the call cannot be identified.
UNKNOWN = -1
# Maximum number of calls kept until their backward pass; the oldest are dropped first.
UNANSWERED = 64
# Maximum number of sampled values kept for calls not yet classified as training or evaluation.
UNDECIDED = 2**18


class TensorIdentity(Uncopied):
    """Identifies tensors without keeping their memory. Autograd's version counter reveals in-place changes.

    >>> import torch
    >>> x = torch.zeros(3)
    >>> identity = TensorIdentity(x)
    >>> identity.matches(x.detach()), identity.matches(x.clone()), identity.matches(x.add_(1))
    (True, False, False)
    """

    def __init__(self, *tensors: Tensor) -> None:
        # The weak reference prevents reuse of the storage address.
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]  # type: ignore[no-untyped-call]
        self._marks = [_mark(x) for x in tensors]

    def matches(self, *tensors: Tensor) -> bool:
        """Whether the tensors are the same and unchanged."""
        return self._marks == [_mark(x) for x in tensors]


def _mark(x: Tensor) -> tuple[object, ...]:
    version = None if x.is_inference() else x._version  # inference tensors have no version and no backward
    return x.untyped_storage()._cdata, x.shape, x.stride(), x.storage_offset(), version


class Origins:
    """Maps a call recomputed inside backward to the original call of the forward pass.

    A reentrant checkpoint runs its forward pass without a graph, and again with a graph inside backward. No graph
    connects the two runs. Autograd numbers its nodes in creation order. The node of the checkpoint is created before
    its forward pass runs. The calls of the checkpoint are therefore the first calls after the number of its node. This
    class stores the calls made without a graph, each with autograd's node count at that time.
    """

    def __init__(self, most: int) -> None:
        self._forwards: deque[tuple[int, int]] = deque(maxlen=most)  # node count, call number
        self._forgotten = -1  # node count of the last dropped call
        self._repeats: list[tuple[int, int]] = []  # the same for calls recomputed without a graph (nested)
        self._run: object = None  # the current recomputation of a checkpoint
        self._left: list[int] = []  # calls not yet recomputed in this run, the next one last

    def add(self, number: int) -> None:
        """Store a call of the forward pass."""
        if len(self._forwards) == self._forwards.maxlen:
            self._forgotten = self._forwards[0][0]
        self._forwards.append((torch._C._autograd._get_sequence_nr(), number))

    def repeated(self, graph: bool) -> int:
        """Return the number of the original of the call being recomputed inside backward, or UNKNOWN.

        `graph` is False in the outer recomputation of nested checkpoints.
        """
        node = torch._C._current_autograd_node()
        # The backward of a compiled graph may also recompute calls, but has no node per call.
        if node is None or node.name() == "CompiledFunctionBackward":
            return UNKNOWN
        start = node._sequence_nr()
        run = torch._C._current_graph_task_id(), start
        if self._run != run:
            # Calls made after the node. If the node was created inside backward: calls recomputed there.
            later = [number for count, number in self._repeats if count > start]
            if not later and self._forgotten <= start:
                later = [number for count, number in self._forwards if count > start]
            self._run, self._left = run, later[::-1]
        number = self._left.pop() if self._left else UNKNOWN
        if not graph and number != UNKNOWN:
            self._repeats.append((torch._C._autograd._get_sequence_nr(), number))
        return number

    def answered(self, number: int) -> None:
        """Drop the recomputations of a call after its backward pass."""
        self._repeats = [repeat for repeat in self._repeats if repeat[1] != number]


class MeasuredCall(NamedTuple):
    """A call measured in forward whose backward pass is pending."""

    sources: TensorIdentity
    measures: MeasuredQuantities  # of the sampled rows
    tally: Tally  # contains the call
    keys: Tensor  # sampling keys of the rows


class LayerListener(Uncopied):
    """Measures the calls of a layer and sums them over micro-batches.

    A call counts as training if gradients were enabled and the module was in training mode, or if a backward pass
    reached the call (a reentrant checkpoint runs its forward pass without gradients). All other calls are evaluation
    calls. They are reported only if the layer had no training call. With `capture`, rows of the last call are kept for
    the dump of an alert.
    """

    def __init__(self, name: str, rows: int | None, capture: bool, module: nn.Module, notices: Notices) -> None:
        self.name = name
        self.rows = rows
        self.capture = capture
        self._module = module
        self._notices = notices
        self.listening = False
        self.trackers: list[LogitTracker] = []
        self.head_shape: tuple[int, int] | None = None  # heads and their dimension, once known
        self._checkpointed = False  # a training call ran without a graph: a reentrant checkpoint may recompute it
        self.seed = 0  # for row sampling; the same in all processes
        self.rank = 0
        self.clock: Iterator[int] = itertools.count()  # of all layers: numbers the passes of a step
        self._number = 0  # of the last call; never reused, so a late backward pass cannot match a different call
        self.reset()

    def reset(self) -> None:
        """Discard all calls."""
        self.failed = False
        self.skipped = False
        self.steps = 0  # since the last report
        self.faults = {True: Faults(), False: Faults()}  # in training mode, and in evaluation mode
        self.training, self.evaluation = Tally(), Tally()
        self._unanswered: OrderedDict[int, MeasuredCall] = OrderedDict()  # by call number
        self._origins = Origins(UNANSWERED)
        self.captured: dict[str, Tensor] = {}
        self._captured_rank = 0
        self._padding_rows: Tensor | None = None  # of the last backward call

    def tally(self) -> Tally:
        """Return the tally to report: training calls if there were any, otherwise evaluation calls."""
        for call in self._unanswered.values():
            self._decide(call, self.evaluation)
        if self.training.backward is not None and self.training.forward is None:
            # The model is trained in evaluation mode: its calls were classified as evaluation.
            self.training.absorb(self.evaluation)
        tally = self.training if self.training.heads else self.evaluation
        faults = self.faults[True].first if self.faults[True].first is not None else self.faults[False].first
        if faults is not None and tally.heads == faults.shape[1]:
            tally.take_faults(faults)
        return tally

    @property
    def tracking(self) -> bool:
        """Whether the largest logits of calls are tracked."""
        return bool(self.trackers)

    @property
    def limit(self) -> float:
        """Logits above it must be known exactly."""
        return min((tracker.limit for tracker in self.trackers), default=math.inf)

    def begin(self, graph: bool) -> int:
        """Return the number of a new call, or of the call that a checkpoint recomputes inside backward."""
        if torch._C._current_graph_task_id() != -1:
            return self._origins.repeated(graph)
        self._number += 1
        return self._number

    def forward(self, event: CallEvent, number: int) -> None:
        """Track the largest logits of a call. If listening, measure its sampled rows."""
        if _is_empty(event.call):
            return
        trained = self._module.training
        self._checkpointed |= trained and not event.graph
        largest = self._track(event, 2 if trained and event.graph else int(event.graph))
        if self.listening:
            self._measure(event, number, trained, largest)

    def repeat(self, event: CallEvent) -> None:
        """Track a call that a checkpoint recomputes inside backward, so that it counts as training."""
        if self._checkpointed and not _is_empty(event.call):
            self._track(event, 2)

    def _track(self, event: CallEvent, rank: int) -> Tensor:
        """Add the largest logits of a call to all trackers. Returns their upper bound [H], exact if listening."""
        self.head_shape = event.call.query.shape[1], event.call.query.shape[3]
        found = bound_largest(event, self.limit, everything=self.listening)
        broken = self._search(event.result.out, event.call)
        if self.trackers:
            numbers = torch.cat([found, broken[None]])
            for tracker in self.trackers:
                tracker.add(rank, numbers)
        return found[1]

    def _measure(self, event: CallEvent, number: int, trained: bool, largest: Tensor) -> None:
        answerable = (trained or event.graph) and number != UNKNOWN
        tally = self.training if trained and event.graph else Tally() if answerable else self.evaluation
        rows, out = self._sampled(event.call), event.result.out
        call = event.call.without_padding()[0].select(rows)
        measures, keys = measure_quantities(call), self._row_keys(call, number)
        tally.add_forward(forward_quantities(measures, call.row_beta()), keys, max_logit=largest)
        before, after = angle_parts(call, out.index_select(2, rows), measures.visible > 0)
        value = event.call.value
        tally.note(
            angle_in=before.nansum(0),
            angle_out=after.nansum(0),
            angle_calls=before.isfinite().sum(0),
            value_squares=squares(value).repeat_interleave(call.group),
            value_numbers=torch.full(call.query.shape[1:2], value[:, 0].numel(), device=value.device),
        )
        if answerable:
            sources = TensorIdentity(*_sources(event.call))
            self._remember(MeasuredCall(sources, measures, tally, keys), number, event.graph)
        rank = answerable + (tally is self.training)
        if self.capture and rank >= self._captured_rank:  # evaluation rows do not replace training rows
            self._captured_rank = rank
            slots = call.context.slots().clamp(0, event.call.key.shape[2] - 1)[0]
            self.captured = {"rows": rows, "query": call.query.clone(), "key": event.call.key[:, :, slots]}

    def backward(self, call: AttentionCall, gradient: Tensor, number: int) -> None:
        """Measure the gradients of the sampled rows, and compare their scores with those of the forward pass.

        Scores are recomputed only if the tensors changed since the forward pass.
        """
        if _is_empty(call):
            return
        rows, sources = self._sampled(call), _sources(call)
        call, self._padding_rows = call.without_padding()
        call = call.select(rows)
        arrived = _blank(gradient, self._padding_rows)
        self.training.note(output_gradient=squares(arrived))
        self._search(arrived, "output gradient")
        self._origins.answered(number)
        past = self._unanswered.pop(number, None)  # also None in a second backward pass
        if past is None:
            self._number += 1  # unknown call: counted as separate rows
            measures, keys = measure_quantities(call), self._row_keys(call, self._number)
        else:
            self._decide(past, self.training)
            measures, keys = past.measures, past.keys
            difference = torch.zeros(gradient.shape[1], device=gradient.device)
            if not past.sources.matches(*sources):
                measures = measure_quantities(call)
                change = (compared_quantities(measures) - compared_quantities(past.measures)).abs()
                difference = change.nan_to_num().amax((0, 1, 3))
            self.training.note(mismatch=difference)
        gradients = score_gradients(call, gradient.index_select(2, rows), measures)
        self.training.add_backward(backward_quantities(measures, call.row_beta(), gradients), keys)

    def gradient(self, gradient: Tensor) -> None:
        """Search the gradient of an output that is not measured for NaN and infinity."""
        self._search(gradient, "output gradient")

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record squared gradient norms per query head. A shared key head is divided equally among its query heads."""
        if 0 in (*query.shape[:3], *key.shape[:3]):
            return
        group = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = (squares(x) for x in (_blank(query, self._padding_rows), key, value))
        if group > 1:
            of_key, of_value = ((x / group).repeat_interleave(group) for x in (of_key, of_value))
        self.training.note(query_gradient=of_query, key_gradient=of_key, value_gradient=of_value)
        total = of_query + of_key + of_value
        self._search(total[None, :, None, None], "gradients")

    def skip(self, call: AttentionCall | None, reason: str) -> None:
        """Count a call that cannot be measured, and warn once per reason."""
        self._notices.add(reason, f"a call of {self.name} was not measured: {reason}")
        self.skipped = True
        if call is not None:
            self.training.note(skipped_calls=torch.ones(call.query.shape[1], device=call.query.device))

    def give_up(self, error: Exception) -> None:
        """Stop measuring until the next report."""
        self.failed = True
        self._notices.add_error(f"the listener of {self.name} failed and is disabled for the rest of this step", error)

    def _search(self, x: Tensor, origin: AttentionCall | str) -> Tensor:
        """Search an output or a gradient for NaN and infinity. Returns 1 [H] for heads that contain one, else 0."""
        return self.faults[self._module.training].add(x, origin, self.steps, next(self.clock))

    def _remember(self, call: MeasuredCall, number: int, graph: bool) -> None:
        """Keep a call for its backward pass. A dropped call counts as evaluation unless it is known to be training."""
        self._unanswered[number] = call
        if not graph:
            self._origins.add(number)
        held = sum(one.tally.numbers for one in self._unanswered.values() if one.tally is not self.training)
        while len(self._unanswered) > UNANSWERED or (held > UNDECIDED and len(self._unanswered) > 1):
            _, first = self._unanswered.popitem(last=False)
            held -= first.tally.numbers if first.tally is not self.training else 0
            self._decide(first, self.evaluation)

    def _decide(self, call: MeasuredCall, tally: Tally) -> None:
        """Add an unclassified call to the given tally."""
        if call.tally is not self.training:
            tally.absorb(call.tally)

    def _row_keys(self, call: AttentionCall, number: int) -> Tensor:
        """Keys of the sampled rows, which differ between calls, steps and processes."""
        rows = call.query.shape[0] * call.query.shape[2]
        return row_keys(salt_of(self.seed, self.rank, number), rows, call.query.device)

    def _sampled(self, call: AttentionCall) -> Tensor:
        queries, device = call.query.shape[2], call.query.device
        return sample_rows(queries, queries if self.rows is None else self.rows, self.seed, device)


def _blank(x: Tensor, rows: Tensor | None) -> Tensor:
    """Zero the given rows [B|1, Tq] of x [B, H, Tq, D]."""
    return x if rows is None else x.masked_fill(rows[:, None, :, None], 0.0)


def _is_empty(call: AttentionCall) -> bool:
    """Whether the call has no sequence, head, query or key."""
    return 0 in (*call.query.shape[:3], call.key.shape[2])


def _sources(call: AttentionCall) -> list[Tensor]:
    """Return the tensors that determine scores and logits."""
    mask = call.context.mask
    return [call.query, call.key, call.row_beta(), *([] if mask is None else [mask])]
