"""Sequences of tokens: windows of a text, needles (a key and its value) hidden in it, and associative recall."""

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
    """One sequence: its tokens, and for each question the places of its answer's tokens and the depth of its needle."""

    tokens: Tensor  # [T]
    answers: Tensor  # [asked, tokens of an answer]: row i is predicted by the row before, answers − 1
    depths: Tensor  # [asked] in [0, 1): where the needle lies, as a share of the text


@dataclass(frozen=True)
class NeedleFormat:
    """How needles and questions are written: templates with {key} and {value}, made of symbols of an alphabet.

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
        """How many different keys there are."""
        return int(len(self.alphabet) ** self.key_symbols)

    def word(self, number: int, symbols: int) -> str:
        """A key or a value: a number in the digits of the alphabet."""
        base = len(self.alphabet)
        return "".join(self.alphabet[number // base**place % base] for place in reversed(range(symbols)))


def _holes(template: str) -> set[str]:
    """The names in braces; none where the braces do not match."""
    try:
        return {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError:
        return set()


# The format in which the embedded model was trained. Its symbols are rare in the text around the needles.
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
    """A sequence of exactly `length` tokens: text with needles at random depths, then `asked` questions with answers.

    The text [N] begins at a random place. What does not fit is refused: nothing is cut off.
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
    last = 0
    for place, needle in sorted(zip(places, written, strict=True), key=lambda pair: pair[0]):
        tokens += body[last:place] + needle
        last = place
    tokens += body[last:]
    found = torch.full((len(answers), max(map(len, answers))), -1, device="cpu")
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        tokens += question
        found[row, : len(answer)] = torch.arange(len(tokens), len(tokens) + len(answer), device="cpu")
        tokens += answer
    depths = torch.tensor([places[i] / max(1, room) for i in order], device="cpu")
    return Retrieval(torch.tensor(tokens, device="cpu"), found, depths)


def recall_sequence(length: int, num_kv_pairs: int, vocabulary: Sequence[int], generator: Generator) -> Retrieval:
    """Multi-query associative recall: pairs of key and value first, then each key again, spread out.

    The task of "Zoology: Measuring and Improving Recall in Efficient Language Models" (arXiv:2312.04927).

    Keys are of the first half of the vocabulary, values of the second; the value after a repeated key is the answer.
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
    return Retrieval(tokens, (places + 1)[:, None], 2 * order / length)


def windows_of(tokens: Tensor, length: int, number: int) -> list[Tensor]:
    """`number` pieces of length + 1 tokens, evenly spread over a text [N]; overlapping ones are refused."""
    if len(tokens) < number * (length + 1):
        reject(
            "text",
            f"{len(tokens)} tokens",
            f"at least {number * (length + 1)}, for {number} windows of {length} tokens that do not overlap",
        )
    stride = (len(tokens) - length - 1) / max(1, number - 1)
    return [tokens[round(i * stride) : round(i * stride) + length + 1] for i in range(number)]


def seeded(*parts: object) -> Generator:
    """A generator for a cell: the same for all policies and models, so that differences between them are paired."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:7], "big"))
