"""Token sequences: windows of a text, needles (key-value pairs) hidden in text, and associative recall."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from attnscale.errors import reject

Encode = Callable[[str], list[int]]


class Retrieval(NamedTuple):
    """One sequence with its questions."""

    tokens: Tensor  # [T]
    answers: Tensor  # [asked, tokens of an answer]: positions; the row at answers − 1 predicts the token
    depths: Tensor  # [asked] in [0, 1): relative position of the needle in the text
    needles: Tensor = torch.zeros(0, 2, dtype=torch.int64, device="cpu")  # [asked, 2]: slots of the answering needle
    written: Tensor = torch.zeros(0, 2, dtype=torch.int64, device="cpu")  # [needles, 2]: slots of every needle


@dataclass(frozen=True)
class NeedleFormat:
    """Templates of needles, questions and answers, with {key} and {value} made of symbols of an alphabet.

    >>> bytes_ = NeedleFormat("<{key}{value}", "<{key}", alphabet="ab", key_symbols=2, value_symbols=1)
    >>> bytes_.most_keys, bytes_.word(2, 2), bytes_.question.format(key="ab")
    (4, 'ba', '<ab')
    """

    needle: str = " The special magic number for {key} is {value}."
    question: str = " The special magic number for {key} is"
    answer: str = " {value}"
    alphabet: str = "0123456789"
    key_symbols: int = 4
    value_symbols: int = 4

    def __post_init__(self) -> None:
        for name, holes in (("needle", ("key", "value")), ("question", ("key",)), ("answer", ("value",))):
            if _holes(getattr(self, name)) != set(holes):
                reject(name, getattr(self, name), f"a text with {' and '.join(f'{{{hole}}}' for hole in holes)}")
        for name in ("key_symbols", "value_symbols"):
            if getattr(self, name) < 1:
                reject(name, getattr(self, name), "a number >= 1")
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2:
            reject("alphabet", self.alphabet, "two or more different symbols")

    @property
    def most_keys(self) -> int:
        """Number of different keys."""
        return int(len(self.alphabet) ** self.key_symbols)

    def word(self, number: int, symbols: int) -> str:
        """Return a key or value: a number written in the digits of the alphabet."""
        base = len(self.alphabet)
        return "".join(self.alphabet[number // base**place % base] for place in reversed(range(symbols)))


def _holes(template: str) -> set[str]:
    """Return the names in braces; an empty set if the braces do not match."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return set()


# The format the embedded model was trained with. Its symbols are rare in the surrounding text.
BYTES = NeedleFormat(
    "\x01{key}{value}", "\x01{key}", "{value}", "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", key_symbols=2, value_symbols=1
)


def hide_needles(
    style: NeedleFormat,
    encode: Encode,
    text: Tensor,
    length: int,
    needles: int,
    asked: int,
    generator: Generator,
) -> Retrieval:
    """Return a sequence of exactly `length` tokens: text with needles at random depths, then questions with answers.

    The text [N] starts at a random position. Raises if needles, questions and text do not fit; nothing is truncated.
    """
    if not 1 <= needles <= style.most_keys:
        reject("needles", needles, f"1 to {style.most_keys}, the number of different keys")
    drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
    keys = [style.word(key, style.key_symbols) for key in torch.randperm(style.most_keys, **drawn)[:needles].tolist()]
    numbers = torch.randint(len(style.alphabet) ** style.value_symbols, (needles,), **drawn).tolist()
    values = [style.word(number, style.value_symbols) for number in numbers]
    written = [encode(style.needle.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
    order = torch.randperm(needles, **drawn)[:asked].tolist()
    questions = [encode(style.question.format(key=keys[i])) for i in order]
    answers = [encode(style.answer.format(value=values[i])) for i in order]
    room = length - sum(len(part) for part in (*written, *questions, *answers))
    if room < needles:
        reject("length", length, f"at least {length - room + needles} tokens for {needles} needles, {asked} questions")
    if text.numel() < room:
        reject("text", f"{text.numel()} tokens", f"at least {room} tokens of text for a length of {length}")
    start = int(torch.randint(text.numel() - room + 1, (1,), **drawn))
    body, places = text[start : start + room].tolist(), torch.randperm(room, **drawn)[:needles].tolist()
    tokens: list[int] = []
    spans = torch.zeros(needles, 2, dtype=torch.int64, device="cpu")
    last = 0
    for number in sorted(range(needles), key=lambda number: places[number]):
        tokens += body[last : places[number]]
        spans[number] = torch.tensor([len(tokens), len(tokens) + len(written[number])], device="cpu")
        tokens += written[number]
        last = places[number]
    tokens += body[last:]
    found = torch.full((len(answers), max(map(len, answers))), -1, device="cpu")
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        tokens += question
        found[row, : len(answer)] = torch.arange(len(tokens), len(tokens) + len(answer), device="cpu")
        tokens += answer
    depths = torch.tensor([places[i] / max(1, room) for i in order], device="cpu")
    return Retrieval(torch.tensor(tokens, device="cpu"), found, depths, spans[order], spans)


def recall_sequence(length: int, num_kv_pairs: int, vocabulary: Sequence[int], generator: Generator) -> Retrieval:
    """Return a sequence of multi-query associative recall: key-value pairs first, then each key again, spread out.

    Keys come from the first half of the vocabulary, values from the second. The value after a repeated key is the
    answer. Source: "Zoology: Measuring and Improving Recall in Efficient Language Models" (arXiv:2312.04927).
    """
    half = len(vocabulary) // 2
    if not 1 <= num_kv_pairs <= half or 4 * num_kv_pairs > length:
        reject("num_kv_pairs", num_kv_pairs, f"1 to {min(half, length // 4)} at input_seq_len={length}")
    drawn: dict[str, Any] = {"generator": generator, "device": generator.device}
    symbols = torch.tensor(list(vocabulary), device="cpu")
    keys = symbols[torch.randperm(half, **drawn)[:num_kv_pairs]]
    values = symbols[half + torch.randint(len(vocabulary) - half, (num_kv_pairs,), **drawn)]
    tokens = symbols[torch.randint(len(vocabulary), (length,), **drawn)]
    tokens[: 2 * num_kv_pairs] = torch.stack([keys, values], -1).flatten()
    slots = torch.randperm((length - 2 * num_kv_pairs) // 2, **drawn)[:num_kv_pairs]
    places = 2 * num_kv_pairs + 2 * slots.sort().values
    order = torch.randperm(num_kv_pairs, **drawn)
    tokens[places], tokens[places + 1] = keys[order], values[order]
    pairs = torch.stack([2 * order, 2 * order + 2], -1)
    return Retrieval(tokens, (places + 1)[:, None], 2 * order / length, pairs, pairs)


def windows_of(tokens: Tensor, length: int, number: int) -> list[Tensor]:
    """Return `number` windows of length + 1 tokens, evenly spread over a text [N]; raise if they would overlap."""
    if len(tokens) < number * (length + 1):
        reject(
            "text",
            f"{len(tokens)} tokens",
            f"at least {number * (length + 1)} tokens for {number} non-overlapping windows of {length} tokens",
        )
    stride = (len(tokens) - length - 1) / max(1, number - 1)
    return [tokens[round(i * stride) : round(i * stride) + length + 1] for i in range(number)]


def seeded(*parts: object) -> Generator:
    """Return the generator of a cell, identical for all policies and models so that differences are paired."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))
