"""The tasks of an evaluation: cells, computation, scoring and display.

A task is a class in `TASKS`. Its fields are options of `Evaluation`. Tables, page, verdict and command line read
everything else from the class.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from typing_extensions import Self

from attnscale.lab.attention_rows import QUANTITIES, ChosenRows, measure_rows
from attnscale.lab.inputs import Text
from attnscale.lab.sequences import NeedleFormat, Retrieval, hide_needles, recall_sequence, seeded, windows_of

Key = dict[str, Any]  # everything that determines the result of a cell

DEPTHS = 5  # number of depth bins

# Maximum number of logits per chunk: a quarter of a gigabyte in fp32.
MOST_LOGITS = 2**26

# Rows measured per length in tasks without questions.
ROWS = 16


class Metric(NamedTuple):
    """A score: its names in results.csv and in lm-evaluation-harness, and its axis label."""

    name: str
    harness: str
    higher_is_better: bool
    axis: str


ACCURACY = Metric("accuracy", "acc", True, "accuracy, 0 to 1")
BITS = Metric("bits_per_byte", "bits_per_byte", False, "bits per byte, lower is better")
NATS = Metric("nats_per_token", "nats_per_token", False, "nats per token, lower is better")


class Score(NamedTuple):
    """One sample of a metric as numerator and denominator; `part` is a depth or position bin, or empty."""

    metric: Metric
    length: int
    part: str
    numerator: float
    denominator: float


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks. Its fields are the options of `Evaluation` that determine the cells."""

    lengths: tuple[int, ...]

    name: ClassVar[str]
    title: ClassVar[str]  # title of its chart
    metrics: ClassVar[tuple[Metric, ...]]  # the first is shown
    measured_rows: ClassVar[str]  # rows of the statistics, completing "rows that ..."
    needs_text: ClassVar[bool] = True

    @classmethod
    def of(cls, options: object) -> Self:
        """Build the task from the options that are fields of it."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @abstractmethod
    def cells(self, text: Text) -> Iterator[Key]:
        """Yield the key of each cell, without model, policy and chunk; raise for invalid options."""

    def check(self, key: Key, text: Text) -> None:  # noqa: B027 (by default `cells` checks everything)
        """Raise for a cell that cannot be computed; called before any cell is computed."""

    @abstractmethod
    def compute(self, model: nn.Module, key: Key, text: Text) -> dict[str, Any]:
        """Compute the content of a cell in one forward pass."""

    @staticmethod
    @abstractmethod
    def scores(key: Key, result: dict[str, Any]) -> Iterator[Score]:
        """Yield the samples of a finished cell."""


@dataclass(frozen=True)
class Perplexity(Task):
    """Next-token prediction in windows of the text; one forward pass at the longest length covers all lengths."""

    windows: int

    name = "perplexity"
    title = "Bits per byte of text"
    metrics = (BITS, NATS)
    measured_rows = "lie in the second half of the text"

    def cells(self, text: Text) -> Iterator[Key]:
        longest = max(self.lengths)
        windows_of(text.tokens, longest, self.windows)
        content = {"text": text.digest, "lengths": sorted(self.lengths), "windows": self.windows}
        for sample in range(self.windows):
            yield {"task": self.name, "length": longest, "sample": sample, **content}

    def compute(self, model: nn.Module, key: Key, text: Text) -> dict[str, Any]:
        window = windows_of(text.tokens, key["length"], self.windows)[key["sample"]]
        return read_window(model, window, self.lengths, text.size, key["chunk"])

    @staticmethod
    def scores(key: Key, result: dict[str, Any]) -> Iterator[Score]:
        """Yield the scores of the second half of each length, and of each bin."""
        bins = result["bins"]
        parts = [(length, "", length // 2, length) for length in key["lengths"]]
        parts += [(key["length"], f"{b['start']}-{b['stop']}", b["start"], b["stop"]) for b in bins]
        for length, name, start, stop in parts:
            inside = [b for b in bins if start <= b["start"] and b["stop"] <= stop]
            nats = sum(b["nats"] for b in inside)
            yield Score(BITS, length, name, nats / math.log(2), sum(b["bytes"] for b in inside))
            yield Score(NATS, length, name, nats, stop - start)


@dataclass(frozen=True)
class RetrievalTask(Task):
    """Questions about a sequence, scored by accuracy, in total and by depth."""

    samples: int
    seed: int

    metrics = (ACCURACY,)
    measured_rows = "predict an answer"

    @abstractmethod
    def content(self, length: int, text: Text) -> Key:
        """Return the key entries that determine the sequences of a length, besides seed and sample."""

    @abstractmethod
    def sequence(self, key: Key, text: Text, generator: Generator) -> Retrieval:
        """Return the sequence of a cell, identical for all policies."""

    def cells(self, text: Text) -> Iterator[Key]:
        for length in self.lengths:
            content = self.content(length, text)
            for sample in range(self.samples):
                yield {"task": self.name, "length": length, "sample": sample, "seed": self.seed, **content}

    def check(self, key: Key, text: Text) -> None:
        if key["sample"] == 0:
            self._sequence(key, text)

    def compute(self, model: nn.Module, key: Key, text: Text) -> dict[str, Any]:
        return answer_questions(model, self._sequence(key, text), key["chunk"])

    def _sequence(self, key: Key, text: Text) -> Retrieval:
        return self.sequence(key, text, seeded(self.seed, self.name, key["length"], key["sample"]))

    @staticmethod
    def scores(key: Key, result: dict[str, Any]) -> Iterator[Score]:
        correct, depths = result["correct"], result["depths"]
        yield Score(ACCURACY, key["length"], "", sum(correct), len(correct))
        for number in range(DEPTHS):
            inside = [right for right, depth in zip(correct, depths, strict=True) if int(depth * DEPTHS) == number]
            part = f"{number / DEPTHS:.1f}-{(number + 1) / DEPTHS:.1f}"
            yield Score(ACCURACY, key["length"], part, sum(inside), len(inside))


@dataclass(frozen=True)
class Needle(RetrievalTask):
    """The value of one key hidden in the text."""

    asked: int
    style: NeedleFormat

    name = "needle"
    title = "Accuracy, needle"

    def needles(self, length: int) -> int:
        """Return the number of needles in a sequence."""
        return 1

    def content(self, length: int, text: Text) -> Key:
        needles = self.needles(length)
        content = {"needles": needles, "asked": min(self.asked, needles), "text": text.digest}
        return content | {"style": dataclasses.asdict(self.style)}

    def sequence(self, key: Key, text: Text, generator: Generator) -> Retrieval:
        return hide_needles(
            self.style, text.encode, text.tokens, key["length"], key["needles"], key["asked"], generator
        )


@dataclass(frozen=True)
class MultiNeedle(Needle):
    """The values of many keys; the number of keys grows with the length."""

    needles_every: int

    name = "multi_needle"
    title = "Accuracy, multi_needle"

    def needles(self, length: int) -> int:
        return max(1, length // self.needles_every)


@dataclass(frozen=True)
class Recall(RetrievalTask):
    """Multi-query associative recall of random tokens."""

    num_kv_pairs: int

    name = "recall"
    title = "Accuracy, recall"
    needs_text = False

    @classmethod
    def of(cls, options: Any) -> Self:
        return dataclasses.replace(super().of(options), lengths=options.input_seq_len or options.lengths)

    def content(self, length: int, text: Text) -> Key:
        return {"num_kv_pairs": self.num_kv_pairs}

    def sequence(self, key: Key, text: Text, generator: Generator) -> Retrieval:
        ordinary = sorted(set(range(len(text.tokenizer))) - set(text.tokenizer.all_special_ids))
        return recall_sequence(key["length"], self.num_kv_pairs, ordinary, generator)


# In page order; the verdict uses the first retrieval task that was measured.
TASKS: dict[str, type[Task]] = {task.name: task for task in (Perplexity, MultiNeedle, Needle, Recall)}


def stream(
    model: nn.Module,
    tokens: Tensor,
    chunk: int,
    wanted: Tensor | None = None,
    measured: ChosenRows | None = None,
    cache: Any = None,
    start: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield positions [R] and their fp32 logits [R, vocabulary] of a sequence [T], chunk by chunk.

    `wanted` [T] is a mask of positions; None selects all. With a KV `cache` of the first `start` tokens, reading starts
    behind them; the cache is extended.
    """
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    chunk = min(chunk, max(1, MOST_LOGITS // head.shape[0])) if wanted is None else chunk
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    for start in range(start, len(tokens), chunk):  # noqa: B020 (the first value is the given one)
        part = tokens[start : start + chunk]
        rows = (
            torch.arange(len(part), device="cpu")
            if wanted is None
            else wanted[start : start + len(part)].nonzero()[:, 0]
        )
        if measured is not None:
            measured.offset = start
        options: dict[str, Any] = {"past_key_values": cache, "use_cache": len(part) < len(tokens)}
        if keeps:
            options["logits_to_keep"] = rows if len(rows) else torch.tensor([0], device="cpu")
        out = model(part[None].to(head.device), **options)
        cache = out.past_key_values if options["use_cache"] else None
        if len(rows):
            logits = out.logits[0] if keeps else out.logits[0, rows]
            yield start + rows, logits.float().cpu()


@torch.inference_mode()
def read_window(
    model: nn.Module, window: Tensor, lengths: Sequence[int], size: Callable[[Tensor], int], chunk: int
) -> dict[str, Any]:
    """Return nats and bytes per bin, from one pass over a window [T + 1]. Bin edges are the lengths and their halves.

    `size` returns the number of bytes of consecutive tokens.
    """
    edges = sorted({0, *(length // 2 for length in lengths), *lengths})
    inputs, targets = window[:-1], window[1:]
    nats = torch.zeros(len(inputs), dtype=torch.float64, device="cpu")
    rows = {length: _spread(length // 2, length) for length in lengths}
    with measure_rows(model, [position for some in rows.values() for position in some]) as measured:
        for positions, logits in stream(model, inputs, chunk, measured=measured):
            nats[positions] = cross_entropy(logits, targets[positions], reduction="none").double()
    bins = [
        {"start": a, "stop": b, "nats": nats[a:b].sum().item(), "bytes": size(targets[a:b])}
        for a, b in itertools.pairwise(edges)
    ]
    return {"bins": bins, "statistics": {str(length): medians(measured, some) for length, some in rows.items()}}


@torch.inference_mode()
def answer_questions(model: nn.Module, retrieval: Retrieval, chunk: int) -> dict[str, Any]:
    """Score the questions of a sequence in one pass. An answer is correct if each of its tokens has the largest logit.

    Teacher-forced: the correct tokens precede each predicted token.
    """
    tokens, answers = retrieval.tokens, retrieval.answers
    asked = answers >= 0
    wanted = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    wanted[answers[asked] - 1] = True
    right = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    rows = (answers[:, 0] - 1).tolist()
    with measure_rows(model, rows) as measured:
        for positions, logits in stream(model, tokens[:-1], chunk, wanted[:-1], measured):
            right[positions + 1] = logits.argmax(-1) == tokens[positions + 1]
    correct = (right[answers.clamp(min=0)] | ~asked).all(1)
    return {
        "correct": correct.int().tolist(),
        "depths": [round(depth, 6) for depth in retrieval.depths.tolist()],
        "statistics": medians(measured, rows),
    }


def medians(measured: ChosenRows, positions: Sequence[int]) -> list[dict[str, Any]]:
    """Return the medians of the quantities over the rows at these positions, for each layer and head."""
    wanted, layers = set(positions), list(dict.fromkeys(table.layer for table in measured.tables))
    found = []
    for layer in layers:
        parts = []
        for table in measured.tables:
            inside = [i for i, position in enumerate(table.positions) if position in wanted]
            if table.layer == layer and inside:
                parts.append(table.values[:, inside])
        if not parts:
            continue
        values = torch.cat(parts, 1)  # [H, R, Q]
        for head, row in enumerate(values.double().nan_to_num(0.0, 1e30, -1e30).quantile(0.5, dim=1).tolist()):
            rounded = {name: float(f"{value:.6g}") for name, value in zip(QUANTITIES, row, strict=True)}
            found.append({"layer": layer, "head": head, "rows": values.shape[1], **rounded})
    return found


def _spread(start: int, stop: int) -> list[int]:
    return sorted({start + (2 * i + 1) * (stop - start) // (2 * ROWS) for i in range(ROWS)})
