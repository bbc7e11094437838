"""Measurements of rows: Λ and the weight on the answer, against eager attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from small_calibration import NEEDLES

import attnscale.hf
from attnscale import accumulation_scale
from attnscale.lab.calibration.heads import RETRIEVES, judge
from attnscale.lab.calibration.measuring import Place, collect, measure_prompt, measure_text, scale_name
from attnscale.lab.calibration.reading import prompt, window
from attnscale.lab.inputs import ModelFolder

LAYER = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def measured(prose):
    model = ModelFolder.at("embedded", "float32").load()
    prompts = [prompt(prose, NEEDLES, length, 128, length, i) for length in (128, 180, 256) for i in range(3)]
    with attnscale.hf.apply(model, "constant"):
        cells = [measure_prompt(model, one, 100) for one in prompts]
        text = [measure_text(model, window(prose, 256, i, 2).tokens, (128, 180, 256), 100) for i in range(2)]
    return prompts, collect(cells), collect(text)


@pytest.fixture(scope="module")
def attention(measured):
    """Attention weights [H, T, T] of the second layer for the first prompt."""
    path = ModelFolder.at("embedded", "float32").path
    eager = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        return eager(measured[0][0].tokens[None], output_attentions=True).attentions[1][0]


def test_the_weight_on_the_answer_is_that_of_eager_attention(measured, attention) -> None:
    prompts, found, _ = measured
    for head in range(2):
        expected = [
            attention[head, answer - 1, start:stop].sum().item()
            for (answer,), (start, stop) in zip(prompts[0].answers.tolist(), prompts[0].needles.tolist(), strict=True)
        ]
        assert found[Place(LAYER, head)].weights[128][0].tolist() == pytest.approx(expected, abs=2e-4)


def test_the_scale_is_that_of_the_scores_without_the_first_keys(measured, attention) -> None:
    prompts, found, _ = measured
    rows = (prompts[0].answers[:, 0] - 1).tolist()
    for head in range(2):
        # ln of a weight is a score up to a constant, which does not change gaps.
        expected = [accumulation_scale(attention[head, row, 4 : row + 1].log(), 8).item() for row in rows]
        values = found[Place(LAYER, head)].scales[scale_name(8, False)][128][0]
        assert values.tolist() == pytest.approx(expected, rel=1e-2)


def test_text_rows_are_near_their_length_and_have_no_answer(measured) -> None:
    _, _, text = measured
    own = text[Place(LAYER, 0)]
    assert sorted(own.scales[scale_name(8, False)]) == [128, 180, 256]
    assert own.weights == {}
    assert {len(one) for one in own.w_max[256]} == {16}


def test_the_heads_that_retrieve_are_those_with_weight_on_the_answers(measured) -> None:
    _, prompts, text = measured
    heads = {head.place: head for head in judge(text, prompts)}
    assert {place for place, head in heads.items() if head.retrieves} == {Place(LAYER, 0), Place(LAYER, 1)}
    for place, head in heads.items():
        assert head.rows_of == ("prompts" if head.retrieves else "text")
        if place.layer != LAYER:  # the first layer sees four tokens: no needle, and no row with eight keys
            assert head.weight < RETRIEVES
            assert head.growth is None
            assert head.lost_between() == (float("inf"), float("inf"))


def test_without_prompts_no_head_is_said_to_retrieve(measured) -> None:
    heads = judge(measured[2], {})
    assert heads
    assert not any(head.retrieves for head in heads)


def test_a_row_of_the_table_holds_the_prediction_for_the_target(measured) -> None:
    _, prompts, text = measured
    head = next(head for head in judge(text, prompts) if head.retrieves)
    row = head.row(4096)
    assert row["first_length"], row["last_length"] == (128, 256)
    assert row["predicted_low"] < head.growth.forms["power"].at(4096)[0].item() < row["predicted_high"]
    assert row["criticality"] == pytest.approx(1 / row["accumulation_8_at_first"])
