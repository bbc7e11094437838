"""Retrieval sequences: exact length, every question answerable, nothing truncated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale.errors import ArgumentError
from attnscale.lab.sequences import BYTES, NeedleFormat, hide_needles, recall_sequence, seeded, windows_of
from scripts.training.embedded import NEEDLE_BYTES, read_text, sample_batch

TEXT = read_text("held_out")


def encode(text: str) -> list[int]:
    return list(text.encode())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from([BYTES, NeedleFormat()]))
def test_every_question_repeats_a_needle_and_asks_for_its_value(needles, asked, seed, style):
    length = 128 * needles
    found = hide_needles(style, encode, TEXT, length, needles, asked, torch.Generator().manual_seed(seed))
    assert found.tokens.shape == (length,)
    assert found.answers.shape[0] == found.depths.shape[0] == min(asked, needles)
    text = bytes(found.tokens.tolist()).decode()
    start = int(found.answers.min()) - len(style.question.format(key="k" * style.key_symbols))
    body = text[:start]
    for places in found.answers:
        before = text[: int(places[0])]
        question = before[-len(style.question) + len("{key}") - style.key_symbols :]
        answer = text[int(places[0]) : int(places[-1]) + 1]
        assert body.count(question + answer) == 1
        assert body.count(question) == 1


def test_the_same_seed_gives_the_same_sequence_and_another_another():
    first, same, other = (
        hide_needles(BYTES, encode, TEXT, 256, 4, 4, seeded(0, "multi_needle", 256, sample)) for sample in (0, 0, 1)
    )
    assert torch.equal(first.tokens, same.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_a_batch_for_training_is_in_the_same_format():
    tokens = sample_batch(TEXT, 3, 128, 4, torch.Generator().manual_seed(0))
    for row in tokens:
        text = bytes(row.tolist())
        body, questions = text[: -4 * NEEDLE_BYTES], text[-4 * NEEDLE_BYTES :]
        asked = [questions[i : i + NEEDLE_BYTES] for i in range(0, len(questions), NEEDLE_BYTES)]
        assert len(set(asked)) == 4
        for needle in asked:
            assert needle[:1] == b"\x01"
            assert all(chr(symbol) in BYTES.alphabet for symbol in needle[1:])
            assert body.count(needle) == 1


@pytest.mark.parametrize(
    ("length", "needles", "text", "message"),
    [
        (20, 4, TEXT, r"length=20 is not accepted: expected at least"),
        (4096, 4, TEXT[:1000], r"text='1000 tokens' is not accepted"),
        (10**6, 2000, TEXT, r"needles=2000 is not accepted: expected 1 to 1296"),
    ],
)
def test_what_does_not_fit_is_refused(length, needles, text, message):
    with pytest.raises(ArgumentError, match=message):
        hide_needles(BYTES, encode, text, length, needles, needles, torch.Generator())


def test_recall_asks_for_the_value_of_each_key_once():
    found = recall_sequence(128, 16, range(100, 200), torch.Generator().manual_seed(1))
    pairs = dict(found.tokens[:32].view(16, 2).tolist())
    assert len(pairs) == 16
    assert all(key < 150 <= value for key, value in pairs.items())
    asked = {int(found.tokens[place - 1]): int(found.tokens[place]) for (place,) in found.answers}
    assert asked == pairs
    assert int(found.answers.min()) > 32


def test_windows_do_not_overlap_and_reach_the_end():
    windows = windows_of(torch.arange(1000), 100, 4)
    assert [int(window[0]) for window in windows] == [0, 300, 599, 899]
    assert all(len(window) == 101 for window in windows)
    with pytest.raises(ArgumentError, match=r"at least 1111 tokens for 11 .*windows of 100 tokens"):
        windows_of(torch.arange(1000), 100, 11)
