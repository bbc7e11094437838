"""The perplexity table: which rows a loss is taken of, what it is compared with, and that the file says the same."""

from __future__ import annotations

import math

import pytest
import torch

from attnscale import ArgumentError
from attnscale.bench.perplexity import Loss, losses, read_table, rows_of, write_table

tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)  # needs transformers
TOKENS = torch.randint(1, 64, (2, 41), generator=torch.Generator().manual_seed(3))


def test_the_second_half_of_each_context_is_measured():
    model = tiny_models.llama()
    with torch.inference_mode():
        logits = model(TOKENS[:, :-1]).logits
    each = torch.nn.functional.cross_entropy(logits.mT, TOKENS[:, 1:], reduction="none")  # [B, T]
    found = losses(model, TOKENS, [10, 40])
    assert {context: loss.tokens for context, loss in found.items()} == {10: 2 * 5, 40: 2 * 20}
    assert found[10].nats == pytest.approx(each[:, 5:10].sum().item(), rel=1e-6)
    assert found[40].nats == pytest.approx(each[:, 20:40].sum().item(), rel=1e-6)


def test_rows_that_do_not_fit_into_one_part_are_all_counted(monkeypatch):
    whole = losses(tiny_models.llama(), TOKENS, [40])[40]
    monkeypatch.setattr("attnscale.bench.perplexity._ROWS", 7)
    parts = losses(tiny_models.llama(), TOKENS, [40])[40]
    assert parts.tokens == whole.tokens
    assert parts.nats == pytest.approx(whole.nats, rel=1e-6)


@pytest.mark.parametrize("contexts", [[], [1], [41]])
def test_contexts_that_the_tokens_do_not_have_are_refused(contexts):
    with pytest.raises(ArgumentError, match=r"contexts=.* 2 to 40"):
        losses(tiny_models.llama(), TOKENS, contexts)


def test_windows_are_averaged_by_token_and_compared_at_the_same_context():
    windows = [{8: Loss(6.0, 2), 16: Loss(4.0, 4)}, {8: Loss(2.0, 6), 16: Loss(8.0, 4)}]
    short, long = rows_of("log", {}, "own", windows, {8: 0.5, 16: 2.0})
    assert (short.context, short.windows, short.tokens, short.nats_per_token) == (8, 2, 8, 1.0)
    assert short.perplexity == pytest.approx(math.e)
    assert short.ratio_to_constant == pytest.approx(math.exp(0.5))
    assert long.ratio_to_constant == pytest.approx(math.exp(-0.5))
    assert [row.ratio_to_constant for row in rows_of("constant", {}, "own", windows)] == [1.0, 1.0]


def test_a_table_reads_as_it_was_written(tmp_path):
    rows = rows_of("log", {"reference_length": 2048, "floor": True}, "yarn", [{8: Loss(6.0, 2)}], {8: 3.0})
    write_table(tmp_path / "table.csv", rows)
    (row,) = read_table(tmp_path / "table.csv")
    assert (row.policy, row.parameters, row.rope) == ("log", '{"floor": true, "reference_length": 2048}', "yarn")
    assert (row.context, row.windows, row.tokens) == (8, 1, 2)
    assert (row.nats_per_token, row.ratio_to_constant) == (3.0, 1.0)
    assert row.perplexity == pytest.approx(math.exp(3.0), abs=5e-7)
    assert read_table(tmp_path / "nothing.csv") == []
