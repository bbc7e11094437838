"""Which rows statistics are of, and over which keys, as far as a call knows: what `RowStats.merge` compares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnscale._util.tracing import is_watched
from attnscale.call.context import Context
from attnscale.errors import ArgumentError


class Span(NamedTuple):
    """The places start … stop − 1 of a sequence, or the heads of a layer."""

    start: int
    stop: int


class RowPlaces(NamedTuple):
    """The places of the rows of a call in their sequence, and of the keys that they were measured against.

    `rows` is a span where all sequences have the same neighbouring rows, else [B|1, Tq]; of a sample, those of all rows
    it was drawn from. `keys` is empty where their places are not known.
    """

    rows: Span | Tensor
    keys: tuple[Span, ...] = ()


def find_places(context: Context) -> RowPlaces | None:
    """The places that a call knows of; None where it says nothing that would tell its rows from others.

    `positions` tell rows apart. Slots do where rows see by them, unless the n of all keys was given: the keys of this
    call are then some of the sequence, and slots count from the first of them.
    """
    by_slot = context.causal or context.window != (None, None) or isinstance(context.slot, Tensor) or context.slot != 0
    slots_are_places = by_slot and context.visible is None and (context.positions is None or _is_slot(context))
    keys = (Span(0, context.keys),) if slots_are_places and context.first is None else ()
    if context.positions is not None:
        return RowPlaces(context.positions, keys)
    if not slots_are_places:
        return None
    slot = context.slot
    return RowPlaces(slot if isinstance(slot, Tensor) else Span(slot, slot + context.queries), keys)


def join_places(a: RowPlaces | None, b: RowPlaces | None) -> RowPlaces | None:
    """The places of statistics that are merged; refuses other rows, and keys that both sides have seen."""
    if a is None or b is None:
        known = b if a is None else a
        return None if known is None else RowPlaces(known.rows)
    if not _same(a.rows, b.rows):
        raise ArgumentError(
            f"statistics of the rows at {_text(a.rows)} and of those at {_text(b.rows)} are not accepted: expected "
            "those of the same rows (where cache_offset counts the keys of one part only, give every part the same "
            "positions= and visible=)"
        )
    for one in a.keys:
        for other in b.keys:
            if one.start < other.stop and other.start < one.stop:
                raise ArgumentError(
                    f"statistics over the keys {_text(one)} and over {_text(other)} are not accepted, as some would "
                    "count twice: expected keys that no other part has"
                )
    return RowPlaces(a.rows, tuple(sorted((*a.keys, *b.keys))) if a.keys and b.keys else ())


def _is_slot(context: Context) -> bool:
    """Whether the slots of the rows were taken from their positions."""
    return context.slot is context.positions


def _same(a: Span | Tensor, b: Span | Tensor) -> bool:
    """Whether rows are at the same places. A graph and the meta device have no values to compare."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return a == b
    if is_watched() or any(isinstance(x, Tensor) and x.is_meta for x in (a, b)):
        return True
    first, second = (x if isinstance(x, Tensor) else torch.arange(*x, device="cpu")[None] for x in (a, b))
    return first is second or bool((first == second.to(first.device)).all())


def _text(places: Span | Tensor) -> str:
    return str(places.tolist()) if isinstance(places, Tensor) else f"{places.start} … {places.stop - 1}"
