"""What one attention layer has shown since the last report: the listener at its tap."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from attnscale.backends.call import AttentionCall
from attnscale.diagnostics.gather import Spread
from attnscale.diagnostics.looks import Look, Looks, see
from attnscale.diagnostics.measure import look, look_back
from attnscale.diagnostics.padding import blank, without_padding
from attnscale.diagnostics.pending import Pending
from attnscale.diagnostics.rows import AGAIN_COLUMNS, BACKWARD, FORWARD, again_quantities
from attnscale.diagnostics.same import Same
from attnscale.statistics import sample_rows
from attnscale.tap import Heard

# One number per head: sums over calls, and for the last two the largest.
SUMS = ("angle_in", "angle_out", "query_gradient", "key_gradient", "value_gradient", "output_gradient")
LARGEST = ("mismatch", "broken_row")

UNANSWERED = 64
# Numbers of a gradient whose norms are taken at a time: they may have to be widened.
NUMBERS = 2**20


class LayerListener:
    """Collects the rows of a layer's calls, over micro-batches and however many calls there are.

    Tensors stay on the layer's device until they are asked for: nothing waits for it meanwhile. Where asked for, rows
    of the last call are captured, for a look at what raised an alert.
    """

    def __init__(self, name: str, rows: int | None, capture: bool = False, looks: Looks | None = None) -> None:
        self.name = name
        self.looks = looks  # those of the whole model
        self.rows = rows
        self.capture = capture
        self.listening = False
        self.failed = False
        self.seed = 0
        self.heads, self.device = 0, torch.device("cpu")  # as last seen
        self.reset()

    def reset(self) -> None:
        """Forget what was heard."""
        self.pending = Pending()
        self._noted: dict[str, list[Tensor]] = {}  # each [H]
        # Of calls whose backward is still to come; without one, only the last are kept.
        self._unanswered: deque[Look] = deque(maxlen=UNANSWERED)
        self.captured: dict[str, Tensor] = {}
        self._padding_rows: Tensor | None = None  # of the call whose backward was told last

    def forward(self, heard: Heard) -> None:
        """Look at the sampled rows of a call."""
        rows = self._sampled(heard.call)
        call = without_padding(heard.call)[0].select(rows)
        self._note(broken_row=_first_broken(heard.out))
        one = Look(self, call, heard.out.index_select(2, rows), Same(*_sources(heard.call)))
        self._unanswered.append(one)
        if heard.lasting and self.looks is not None:
            self.looks.add(one)
        else:
            see([one])
        if self.capture:
            slots = call.context.slots().clamp(0, heard.call.key.shape[2] - 1)[0]
            key = heard.call.key[:, :, slots]
            self.captured = {"rows": rows, "query": call.query.clone(), "key": key}

    def backward(self, call: AttentionCall, gradient: Tensor) -> None:
        """Look at the same rows as backward sees them; calls are answered last first.

        What is of the same tensors as in forward need not be computed again to be known.
        """
        rows = self._sampled(call)
        upstream = gradient.index_select(2, rows)
        call, self._padding_rows = without_padding(call)
        self._note(output_gradient=_squares(blank(gradient, self._padding_rows)))
        one = self._unanswered.pop() if self._unanswered else None
        if one is not None and one.sources.are(*_sources(call)):
            self._note(mismatch=torch.zeros(gradient.shape[1], device=gradient.device))
            if one.waits and self.looks is not None:
                self.looks.answer(one, upstream)
            elif (seen := one.sums()) is not None:
                gradients = look_back(call.select(rows), upstream, seen)
                self.pending.add_backward(seen, gradients)
        else:
            self._look_again(call.select(rows), upstream, None if one is None else one.sums())

    def _look_again(self, call: AttentionCall, upstream: Tensor, seen: Tensor | None) -> None:
        """At rows that were recomputed, or never seen; by how much they differ, if they were."""
        sums, gradients = look([call], [upstream])
        again = sums[0, ..., :AGAIN_COLUMNS]
        if gradients is not None:
            self.pending.add_backward(again, gradients[0])
        if seen is not None:
            difference = (again_quantities(again) - again_quantities(seen)).abs()
            self._note(mismatch=difference.nan_to_num().amax((0, 1, 3)))

    def saw(self, sums: Tensor, angles: tuple[Tensor, Tensor], gradients: Tensor | None) -> None:
        """Take in what a look has shown of rows, [B, H, R, ·], of their angles, [B, H], and, if it came late, of
        gradients.
        """
        self.pending.add_forward(sums)
        self._note(angle_in=angles[0].sum(0), angle_out=angles[1].sum(0))
        if gradients is not None:
            self.pending.add_backward(sums[..., :AGAIN_COLUMNS], gradients)

    def gradients(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Squared norms per query head; a key head that several share is divided among them."""
        group = query.shape[1] // key.shape[1]
        of_query, of_key, of_value = (_squares(x) for x in (blank(query, self._padding_rows), key, value))
        if group > 1:
            of_key, of_value = ((x / group).repeat_interleave(group) for x in (of_key, of_value))
        self._note(query_gradient=of_query, key_gradient=of_key, value_gradient=of_value)

    @property
    def width(self) -> int:
        """How many rows are kept for the quantiles."""
        spreads = (self.pending.forward, self.pending.backward)
        return max((spread.sample.shape[-1] for spread in spreads if spread is not None), default=0)

    def spreads(self) -> tuple[Spread, Spread]:
        """Of the quantities of forward and backward, with nothing in it where nothing was heard."""
        forward, backward = self.pending.forward, self.pending.backward
        return (
            self._no_rows(FORWARD) if forward is None else forward,
            self._no_rows(BACKWARD) if backward is None else backward,
        )

    def scalar(self, name: str) -> Tensor:
        """What a head has one of, of all calls together, [H]."""
        noted = self._noted.get(name)
        if not noted:
            return torch.full((self.heads,), 0.0 if name in SUMS else -1.0, device=self.device)
        if len(noted) == 1:
            return noted[0]
        together = torch.stack(noted)
        return together.sum(0) if name in SUMS else together.amax(0)

    def _sampled(self, call: AttentionCall) -> Tensor:
        queries, device = call.query.shape[2], call.query.device
        return sample_rows(queries, queries if self.rows is None else self.rows, self.seed, device)

    def _no_rows(self, names: Sequence[str]) -> Spread:
        return Spread.of(torch.full((len(names), self.heads, 1), math.nan, device=self.device))

    def _note(self, **numbers: Tensor) -> None:
        for name, value in numbers.items():
            self.heads, self.device = value.shape[0], value.device
            noted = self._noted.setdefault(name, [])
            noted.append(value.to(torch.float32))
            if len(noted) > UNANSWERED:
                self._noted[name] = [self.scalar(name)]


def pack(layers: Sequence[LayerListener], sample: int) -> Tensor:
    """What all layers have heard as one tensor [H, ·] on the CPU, of a shape that does not depend on what it was."""
    by_device: dict[torch.device, list[LayerListener]] = {}
    for layer in layers:
        by_device.setdefault(layer.device, []).append(layer)
    packed: dict[str, Tensor] = {}
    for group in by_device.values():  # each of which the host waits for once
        parts = torch.split(_pack(group, sample).cpu(), [layer.heads for layer in group])
        packed |= zip((layer.name for layer in group), parts, strict=True)
    return torch.cat([packed[layer.name] for layer in layers])


def _pack(layers: Sequence[LayerListener], sample: int) -> Tensor:
    phases = zip(*(layer.spreads() for layer in layers), strict=True)
    rows = torch.cat([Spread.beside(spreads).flat(sample) for spreads in phases])  # [Q, H, ·]
    scalars = torch.cat([layer.scalar(name) for name in (*SUMS, *LARGEST) for layer in layers])
    return torch.cat([rows.movedim(1, 0).flatten(1), scalars.view(len(SUMS + LARGEST), -1).T], dim=1)


def unpack(flats: Tensor, sample: int) -> tuple[Spread, Tensor]:
    """Quantities of forward and backward, of all processes, and scalars [SUMS + LARGEST, H], from [P, H, ·]."""
    quantities, width = len(FORWARD) + len(BACKWARD), 4 + sample
    rows, sums, largest = torch.split(flats, [quantities * width, len(SUMS), len(LARGEST)], dim=-1)
    spread = Spread.join(rows.reshape(*rows.shape[:2], quantities, width).movedim(2, 1))
    return spread, torch.cat([sums.sum(0), largest.amax(0)], dim=-1).T


def _sources(call: AttentionCall) -> list[Tensor]:
    """What scores and logits are made of."""
    mask = call.context.mask
    return [call.query, call.key, call.row_beta(), *([] if mask is None else [mask])]


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each head of [B, H, T, D]; row by row first, for which no copy is made."""
    rows = max(1, NUMBERS // (x.shape[0] * x.shape[1] * x.shape[3]))
    return reduce(torch.add, (_squares_of(part) for part in torch.split(x, rows, dim=2)))


def _squares_of(x: Tensor) -> Tensor:
    # In the order of memory, where projections leave heads side by side: that is twice as fast.
    beside = x.stride(1) < x.stride(2)
    norms: Tensor = torch.linalg.vector_norm(x.transpose(1, 2) if beside else x, dim=-1, dtype=torch.float32)
    return norms.square_().sum((0, 1) if beside else (0, 2))


def _first_broken(out: Tensor) -> Tensor:
    """Per head the first row that holds a NaN or an infinity, −1 if none."""
    if out.device.type == "cpu" and math.isfinite(
        float(out.sum())
    ):  # as always but once; elsewhere, asking would be waiting
        return torch.full(out.shape[1:2], -1)
    broken = (~torch.isfinite(out.to(torch.float32).sum(-1))).any(0)  # [H, Tq]
    return torch.where(broken.any(-1), broken.to(torch.uint8).argmax(-1), -1)
