"""Sequences for retrieval: needles (a key and its value) hidden in text, and questions for some of them at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple

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
    >>> bytes_.most_keys, bytes_.key(2), bytes_.question.format(key="ab")
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

    def key(self, number: int) -> str:
        """The key of a number below `most_keys`."""
        return self._word(number, self.key_symbols)

    def value(self, number: int) -> str:
        """The value of a number."""
        return self._word(number, self.value_symbols)

    def _word(self, number: int, symbols: int) -> str:
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
    keys = torch.randperm(style.most_keys, generator=generator, device=generator.device)[:needles].tolist()
    values = torch.randint(
        len(style.alphabet) ** style.value_symbols, (needles,), generator=generator, device=generator.device
    ).tolist()
    written = [
        encode(style.needle.format(key=style.key(k), value=style.value(v))) for k, v in zip(keys, values, strict=True)
    ]
    order = torch.randperm(needles, generator=generator, device=generator.device)[:asked].tolist()
    questions = [encode(style.question.format(key=style.key(keys[i]))) for i in order]
    answers = [encode(style.answer.format(value=style.value(values[i]))) for i in order]
    room = length - sum(map(len, written)) - sum(map(len, questions)) - sum(map(len, answers))
    if room < needles:
        reject("length", length, f"at least {length - room + needles} tokens for {needles} needles, {asked} questions")
    if text.numel() < room:
        reject("text", f"{text.numel()} tokens", f"at least {room} tokens of text for a length of {length}")
    start = int(torch.randint(text.numel() - room + 1, (1,), generator=generator, device=generator.device))
    places = torch.randperm(room, generator=generator, device=generator.device)[:needles]
    return _assemble(text[start : start + room].tolist(), written, places.tolist(), questions, answers, order)


def _assemble(
    text: list[int],
    needles: Sequence[list[int]],
    places: list[int],
    questions: Sequence[list[int]],
    answers: Sequence[list[int]],
    order: list[int],
) -> Retrieval:
    tokens: list[int] = []
    last = 0
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        tokens += text[last:place] + needle
        last = place
    tokens += text[last:]
    width = max(map(len, answers))
    found = torch.full((len(answers), width), -1, device="cpu")
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        tokens += question
        found[row, : len(answer)] = torch.arange(len(tokens), len(tokens) + len(answer), device="cpu")
        tokens += answer
    depths = torch.tensor([places[i] / max(1, len(text)) for i in order], device="cpu")
    return Retrieval(torch.tensor(tokens, device="cpu"), found, depths)
