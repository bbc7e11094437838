"""The tasks of an evaluation: the cells of each, how a cell is computed and scored, and how the score is shown.

A task is a class in `TASKS`. `Evaluation` builds it from those of its options that the class has as fields; tables,
page, verdict and command line read the rest from the class.
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

from attnscale.lab.attention_rows import QUANTITIES, ChosenRows, listen_to_rows
from attnscale.lab.inputs import Text
from attnscale.lab.sequences import NeedleFormat, Retrieval, hide_needles, recall_sequence, seeded, windows_of

Key = dict[str, Any]  # everything that decides the result of a cell

DEPTHS = 5  # bins of the depth of an answer

# Logits of a chunk hold at most so many numbers: a quarter of a gigabyte in fp32.
MOST_LOGITS = 2**26

# Rows measured per length where no question says which rows matter.
ROWS = 16


class Metric(NamedTuple):
    """A score: its names in results.csv and in lm-evaluation-harness, and the label of its axis."""

    name: str
    harness: str
    higher_is_better: bool
    axis: str


ACCURACY = Metric("accuracy", "acc", True, "share answered, 0 to 1")
BITS = Metric("bits_per_byte", "bits_per_byte", False, "bits per byte, less is better")
NATS = Metric("nats_per_token", "nats_per_token", False, "nats per token, less is better")


class Score(NamedTuple):
    """One sample of a metric, as a numerator and a denominator; `part` is a bin of depth or position, or empty."""

    metric: Metric
    length: int
    part: str
    numerator: float
    denominator: float


@dataclass(frozen=True)
class Task(ABC):
    """The fields are the options of `Evaluation` that decide the cells."""

    lengths: tuple[int, ...]

    name: ClassVar[str]
    title: ClassVar[str]  # of its chart
    metrics: ClassVar[tuple[Metric, ...]]  # the first is the one that is shown
    measured_rows: ClassVar[str]  # of which rows statistics are taken, as the end of a sentence
    needs_text: ClassVar[bool] = True

    @classmethod
    def of(cls, options: object) -> Self:
        """The task with those options that it has as fields."""
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})

    @abstractmethod
    def cells(self, text: Text) -> Iterator[Key]:
        """The key of each cell, without model, policy and chunk; what cannot be measured is refused."""

    def check(self, key: Key, text: Text) -> None:  # noqa: B027 (`cells` has refused everything, unless overridden)
        """Refuse a cell that cannot be computed, before the first one is."""

    @abstractmethod
    def compute(self, model: nn.Module, key: Key, text: Text) -> dict[str, Any]:
        """The content of a cell, by one forward pass."""

    @staticmethod
    @abstractmethod
    def scores(key: Key, result: dict[str, Any]) -> Iterator[Score]:
        """The samples in a finished cell."""


@dataclass(frozen=True)
class Perplexity(Task):
    """The next token, in windows of the text; one forward pass of the longest length gives all lengths."""

    windows: int

    name = "perplexity"
    title = "Bits per byte of prose"
    metrics = (BITS, NATS)
    measured_rows = "lie in the last half of the text"

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
        """Of the second half of each length, and between all edges."""
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
    """Questions about a sequence, scored by the share of right answers, in total and by depth."""

    samples: int
    seed: int

    metrics = (ACCURACY,)
    measured_rows = "predict an answer"

    @abstractmethod
    def content(self, length: int, text: Text) -> Key:
        """What decides the sequences of a length, beside seed and sample."""

    @abstractmethod
    def sequence(self, key: Key, text: Text, generator: Generator) -> Retrieval:
        """The sequence of a cell, the same for all policies."""

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
        """How many needles a sequence has."""
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
    """The values of many keys, whose number grows with the length."""

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


# In the order of the page; the first task of retrieval that was measured is the one of the verdict.
TASKS: dict[str, type[Task]] = {task.name: task for task in (Perplexity, MultiNeedle, Needle, Recall)}


def stream(
    model: nn.Module, tokens: Tensor, chunk: int, wanted: Tensor | None = None, listener: ChosenRows | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Positions [R] and their logits [R, vocabulary] in fp32, chunk by chunk, of a sequence [T].

    `wanted` [T] says which positions; None is all of them.
    """
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    chunk = min(chunk, max(1, MOST_LOGITS // head.shape[0])) if wanted is None else chunk
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    cache = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        rows = (
            torch.arange(len(part), device="cpu")
            if wanted is None
            else wanted[start : start + len(part)].nonzero()[:, 0]
        )
        if listener is not None:
            listener.offset = start
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
    """Nats and bytes between the edges of the lengths, in one forward of a window [T + 1].

    `size` tells the bytes of consecutive tokens. A length's own figure is that of its second half.
    """
    edges = sorted({0, *(length // 2 for length in lengths), *lengths})
    inputs, targets = window[:-1], window[1:]
    nats = torch.zeros(len(inputs), dtype=torch.float64, device="cpu")
    rows = {length: _spread(length // 2, length) for length in lengths}
    with listen_to_rows(model, [position for some in rows.values() for position in some]) as listener:
        for positions, logits in stream(model, inputs, chunk, listener=listener):
            nats[positions] = cross_entropy(logits, targets[positions], reduction="none").double()
    bins = [
        {"start": a, "stop": b, "nats": nats[a:b].sum().item(), "bytes": size(targets[a:b])}
        for a, b in itertools.pairwise(edges)
    ]
    return {"bins": bins, "statistics": {str(length): medians(listener, some) for length, some in rows.items()}}


@torch.inference_mode()
def answer_questions(model: nn.Module, retrieval: Retrieval, chunk: int) -> dict[str, Any]:
    """Which questions of a sequence are answered, every token of an answer the most likely one, in one forward.

    Teacher-forced: the tokens before the one in question are always the right ones.
    """
    tokens, answers = retrieval.tokens, retrieval.answers
    asked = answers >= 0
    wanted = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    wanted[answers[asked] - 1] = True
    right = torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
    rows = (answers[:, 0] - 1).tolist()
    with listen_to_rows(model, rows) as listener:
        for positions, logits in stream(model, tokens[:-1], chunk, wanted[:-1], listener):
            right[positions + 1] = logits.argmax(-1) == tokens[positions + 1]
    correct = (right[answers.clamp(min=0)] | ~asked).all(1)
    return {
        "correct": correct.int().tolist(),
        "depths": [round(depth, 6) for depth in retrieval.depths.tolist()],
        "statistics": medians(listener, rows),
    }


def medians(listener: ChosenRows, positions: Sequence[int]) -> list[dict[str, Any]]:
    """For each layer and head the medians of the quantities over the rows at these positions."""
    wanted, layers = set(positions), list(dict.fromkeys(table.layer for table in listener.tables))
    found = []
    for layer in layers:
        parts = []
        for table in listener.tables:
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
