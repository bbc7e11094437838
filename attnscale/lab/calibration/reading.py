"""Sequences for calibration, and reading them: a text with hidden needles and questions, in chunks through a KV cache.

A sequence without needles is a window of the text. Its rows are scored in the same pass: the next token of the text
beyond the needles, and the answers.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnscale._util.optional import need
from attnscale.lab.inputs import Text
from attnscale.lab.sequences import NeedleFormat, hide_needles, seeded, windows_of
from attnscale.lab.tasks import stream

# Tokens after a needle that are not scored as text: the needle interrupts the sentence.
AFTER_NEEDLE = 4

# Positions at which bits per byte are reported, in multiples of the trained length, are doubled from here.
BINS = 2


@dataclass(frozen=True)
class Sequence:
    """Tokens [T] with the rows to score.

    Attributes:
        tokens: the sequence.
        text: mask [T] of tokens that are scored as text.
        answers: positions [asked, tokens of an answer], −1 where an answer is shorter; [0, 2] without questions.
        needles: slots [asked, 2] of the needle that holds each answer; [0, 2] without questions.
    """

    tokens: Tensor
    text: Tensor
    answers: Tensor
    needles: Tensor

    def with_text(self, marks: Tensor) -> Sequence:
        """Return the sequence with another mask of scored text."""
        return replace(self, text=marks)

    @property
    def asked(self) -> Tensor:
        """Mask [T] of the answers' tokens."""
        mask = torch.zeros(len(self.tokens), dtype=torch.bool, device="cpu")
        mask[self.answers[self.answers >= 0]] = True
        return mask


class Needles(NamedTuple):
    """How many needles a prompt has: `at_trained` at the trained length, growing with the length to a power."""

    style: NeedleFormat
    at_trained: float
    growth: float
    asked: int

    def number(self, length: int, trained: int) -> int:
        """Return the number of needles at a length.

        >>> [Needles(NeedleFormat(), 4, growth, 32).number(2048, 128) for growth in (0.0, 0.5, 1.0)]
        [4, 16, 64]
        """
        return max(1, round(self.at_trained * float((length / trained) ** self.growth)))


def prompt(text: Text, needles: Needles, length: int, trained: int, *seed: object) -> Sequence:
    """Return a text with needles and questions of exactly this length."""
    number = needles.number(length, trained)
    found = hide_needles(
        needles.style, text.encode, text.tokens, length, number, min(needles.asked, number), seeded(*seed)
    )
    marks = torch.ones(length, dtype=torch.bool, device="cpu")
    first = int(found.answers[:, 0].min()) - len(text.encode(needles.style.question.format(key=_a_key(needles.style))))
    marks[max(0, first) :] = False
    for start, stop in found.written.tolist():
        marks[start : stop + AFTER_NEEDLE] = False
    marks[0] = False
    return Sequence(found.tokens, marks, found.answers, found.needles)


def window(text: Text, length: int, number: int, of: int) -> Sequence:
    """Return one of several non-overlapping windows of a text."""
    tokens = windows_of(text.tokens, length - 1, of)[number]
    marks = torch.ones(length, dtype=torch.bool, device="cpu")
    marks[0] = False
    nothing = torch.zeros(0, 2, dtype=torch.int64, device="cpu")
    return Sequence(tokens, marks, nothing, nothing)


class Prefix(NamedTuple):
    """The KV cache of the first `length` tokens, and the results of their rows."""

    cache: Any
    length: int
    nats: Tensor
    right: Tensor


def score(
    model: nn.Module, sequence: Sequence, chunk: int, *, stop: int | None = None, prefix: Prefix | None = None
) -> Prefix:
    """Return nats [T] of the scored tokens and whether their logit is the largest, and the KV cache.

    Args:
        model: the model, with its policy.
        sequence: what to read.
        chunk: tokens per forward pass.
        stop: read only so many tokens.
        prefix: the result for the first tokens, if it is known. It is not modified.
    """
    tokens = sequence.tokens if stop is None else sequence.tokens[:stop]
    wanted = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    marks = sequence.text | sequence.asked
    wanted[: len(tokens)] = torch.cat([marks[1:], marks[:0].new_zeros(1)])[: len(tokens)]
    nats = torch.zeros(len(sequence.tokens), dtype=torch.float64, device="cpu")
    right = torch.zeros(len(sequence.tokens), dtype=torch.bool, device="cpu")
    start, cache = 0, new_cache(model)
    if prefix is not None:
        start, cache, nats, right = prefix.length, fork(prefix.cache), prefix.nats.clone(), prefix.right.clone()
    for positions, logits in stream(model, tokens, chunk, wanted, cache=cache, start=start):
        targets = sequence.tokens[positions + 1]
        nats[positions + 1] = cross_entropy(logits, targets, reduction="none").double()
        right[positions + 1] = logits.argmax(-1) == targets
    return Prefix(cache, len(tokens), nats, right)


def new_cache(model: nn.Module) -> Any:
    """Return an empty KV cache for a model."""
    return need("transformers", "calibrate", "hf").DynamicCache(config=model.config)


def fork(cache: Any) -> Any:
    """Return a copy of a KV cache that shares its tensors: updates concatenate, and replace the tensors of the copy."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def summary(sequence: Sequence, found: Prefix, text: Text, edges: list[int]) -> dict[str, Any]:
    """Return nats and bytes of the text between the edges, and correctness and nats of the answers."""
    bins = []
    for left, right in itertools.pairwise(edges):
        inside = sequence.text.clone()
        inside[:left], inside[right:] = False, False
        size = _bytes(text, sequence.tokens, inside)
        bins.append({"start": left, "stop": right, "nats": found.nats[inside].sum().item(), "bytes": size})
    known = sequence.answers >= 0
    places = sequence.answers.clamp(min=0)
    return {
        "bins": bins,
        "correct": (found.right[places] | ~known).all(1).int().tolist() if len(places) else [],
        "answer_nats": (found.nats[places] * known).sum(1).tolist() if len(places) else [],
        "answer_tokens": known.sum(1).tolist() if len(places) else [],
    }


def _bytes(text: Text, tokens: Tensor, inside: Tensor) -> int:
    """Return the number of bytes of the marked tokens, run by run: consecutive tokens are decoded together."""
    places = inside.nonzero()[:, 0]
    if not len(places):
        return 0
    breaks = (places.diff() > 1).nonzero()[:, 0] + 1
    return sum(text.size(tokens[run]) for run in torch.tensor_split(places, breaks))


def bin_edges(trained: int, length: int) -> list[int]:
    """Return the edges of the bins by position: halves of the trained length, then doublings.

    >>> bin_edges(128, 1000)
    [0, 64, 128, 256, 512, 1000]
    """
    edges = [0, trained // BINS, trained]
    while edges[-1] * BINS < length:
        edges.append(edges[-1] * BINS)
    return sorted({edge for edge in (*edges, length) if edge <= length})


def far_nats(found: Prefix, sequence: Sequence, trained: int) -> tuple[float, float]:
    """Return mean nats of the text beyond the trained length, and of the answers' tokens; NaN where there are none."""
    beyond = sequence.text.clone()
    beyond[:trained] = False
    asked = sequence.asked
    return _mean(found.nats[beyond]), _mean(found.nats[asked])


def _mean(values: Tensor) -> float:
    return values.mean().item() if len(values) else math.nan


def _a_key(style: NeedleFormat) -> str:
    return style.word(0, style.key_symbols)


def part_of(text: Text, start: float, stop: float) -> Text:
    """Return a part of a text, given as shares of its tokens."""
    tokens = text.tokens[int(start * len(text.tokens)) : int(stop * len(text.tokens))]
    return text._replace(tokens=tokens, digest=f"{text.digest}:{start:g}-{stop:g}")
