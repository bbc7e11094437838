"""Sequences of a calibration: which tokens are scored, and reading them in parts."""

from __future__ import annotations

import pytest
import torch
from small_calibration import NEEDLES

import attnscale.hf
from attnscale.lab.calibration.reading import AFTER_NEEDLE, bin_edges, part_of, prompt, score, summary, window
from attnscale.lab.sequences import BYTES


def test_a_prompt_scores_the_text_but_no_needle_and_no_question(prose) -> None:
    found = prompt(prose, NEEDLES, 256, 128, 0)
    assert len(found.tokens) == len(found.text) == 256
    marker = ord("\x01")
    first_question = int(found.answers.min()) - 3
    assert not found.text[first_question:].any()
    for start in (found.tokens[:first_question] == marker).nonzero()[:, 0].tolist():
        assert not found.text[start : start + 4 + AFTER_NEEDLE].any()
    assert found.text.sum() > 128


def test_the_needle_of_an_answer_holds_it(prose) -> None:
    found = prompt(prose, NEEDLES, 512, 128, 0)
    for (answer,), (start, stop) in zip(found.answers.tolist(), found.needles.tolist(), strict=True):
        assert stop - start == len("\x01") + BYTES.key_symbols + BYTES.value_symbols
        assert torch.equal(found.tokens[start:stop], found.tokens[answer - 3 : answer + 1])


@pytest.mark.parametrize(("growth", "numbers"), [(0.0, [4, 4]), (0.5, [4, 8]), (1.0, [4, 16])])
def test_needles_grow_with_a_power_of_the_length(growth, numbers) -> None:
    assert [NEEDLES._replace(growth=growth).number(length, 128) for length in (128, 512)] == numbers


def test_windows_do_not_overlap_and_every_token_but_the_first_is_scored(prose) -> None:
    first, second = (window(prose, 300, number, 2) for number in range(2))
    assert not torch.equal(first.tokens, second.tokens)
    assert first.text.tolist() == [False] + [True] * 299


@pytest.mark.parametrize("chunk", [64, 100])
def test_reading_on_from_a_prefix_gives_the_same_and_leaves_the_prefix_alone(model, prose, chunk) -> None:
    sequence = prompt(prose, NEEDLES, 300, 128, 0)
    with attnscale.hf.apply(model, "log", reference_length=128, floor=True, layers="full"), torch.no_grad():
        whole = score(model, sequence, chunk)
        prefix = score(model, sequence, chunk, stop=130)
        kept = prefix.nats.clone(), prefix.cache.get_seq_length()
        for _ in range(2):
            rest = score(model, sequence, chunk, prefix=prefix)
            torch.testing.assert_close(rest.nats, whole.nats, rtol=1e-4, atol=1e-4)
            assert torch.equal(rest.right, whole.right)
        assert torch.equal(prefix.nats, kept[0])
        assert prefix.cache.get_seq_length() == kept[1]


def test_the_summary_adds_up_to_the_text_and_the_answers(model, prose) -> None:
    sequence = prompt(prose, NEEDLES, 300, 128, 0)
    with attnscale.hf.apply(model, "constant"), torch.no_grad():
        found = score(model, sequence, 300)
    result = summary(sequence, found, prose, bin_edges(128, 300))
    assert sum(one["bytes"] for one in result["bins"]) == int(sequence.text.sum())  # one byte per token
    assert sum(one["nats"] for one in result["bins"]) == pytest.approx(found.nats[sequence.text].sum().item())
    places = sequence.answers[:, 0]
    assert result["answer_nats"] == pytest.approx(found.nats[places].tolist())
    assert result["correct"] == found.right[places].int().tolist()


def test_scores_are_those_of_a_plain_forward_pass(model, prose) -> None:
    sequence = window(prose, 100, 0, 1)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(sequence.tokens[None]).logits[0, :-1], sequence.tokens[1:], reduction="none"
        )
        with attnscale.hf.apply(model, "constant"):
            found = score(model, sequence, 32)
    torch.testing.assert_close(found.nats[1:].float(), losses, rtol=1e-4, atol=1e-4)


def test_parts_of_a_text_do_not_share_tokens_and_have_their_own_digest(prose) -> None:
    first, second = part_of(prose, 0.0, 0.5), part_of(prose, 0.5, 1.0)
    assert torch.equal(torch.cat([first.tokens, second.tokens]), prose.tokens)
    assert first.digest != second.digest
