"""The listener at the tap of one attention layer: measures its calls between two reports."""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnscale._util.uncopied import Uncopied
from attnscale.call.attention_call import AttentionCall
from attnscale.call.tap import CallEvent
from attnscale.diagnostics.alerts import Notices
from attnscale.diagnostics.padding_rows import blank, without_padding
from attnscale.diagnostics.recomputed_calls import UNKNOWN, Origins
from attnscale.diagnostics.records.tally import Tally, salt_of
from attnscale.diagnostics.tensor_identity import TensorIdentity
from attnscale.statistics import sample_rows
from attnscale.statistics.rows.angles import angle_parts
from attnscale.statistics.rows.quantities import (
    backward_quantities,
    compared_quantities,
    forward_quantities,
    measure_quantities,
)
from attnscale.statistics.rows.row_measures import RowMeasures
from attnscale.statistics.rows.score_gradients import score_gradients

# Calls whose backward is waited for; of more, the first are forgotten.
UNANSWERED = 64
# Numbers of calls that are held apart because they may turn out to be of training.
UNDECIDED = 2**18
# Numbers of a gradient whose norms are taken at a time: they may have to be widened.
NUMBERS = 2**20


class MeasuredCall(NamedTuple):
    """A call that was measured in forward and whose backward may still come."""

    sources: TensorIdentity
    measures: RowMeasures  # of its sampled rows
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
        """A call that was held apart belongs to training, or to evaluation."""
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
