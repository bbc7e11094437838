"""The percentiles of a monitor are those of all rows, over batches, calls and processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale import Monitor, ScaledDotProductAttention, StatsRequest, row_statistics
from attnscale.diagnostics.records.tally import KEPT, Spread, row_keys, salt_of, summaries
from attnscale.statistics import sample_rows

CPU = torch.device("cpu")
# Five deviations of the share of a sample that lies below a quantile, at one half.
SLACK = 5 * 0.5 / KEPT**0.5


def watched(batch: int, length: int, calls: int = 1, **arguments):
    """The record of one head whose rows become sharper with fewer keys, and the exact w_max and n of all rows."""
    generator = torch.Generator().manual_seed(0)
    attention, w_max = ScaledDotProductAttention("constant"), []
    with Monitor(attention, every=1, rows=length, **arguments) as monitor:
        for _ in range(calls):
            q, k = (torch.randn(batch, 1, length, 8, generator=generator) * 1.5 for _ in range(2))
            attention(q, k, k, is_causal=True)
            scores, mask = q @ k.mT / 8**0.5, torch.ones(length, length).tril().bool()
            w_max.append(row_statistics(scores, 1.0, mask, StatsRequest()).w_max.flatten())
        (record,) = monitor.step(0)
    return record, torch.cat(w_max), torch.arange(1, length + 1).repeat(batch * calls)


def assert_quantiles(summary, values: torch.Tensor) -> None:
    """Of so many values, the shares below the marks are what they should be."""
    for mark, level in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9)):
        at = getattr(summary, mark)
        below, not_above = (values < at - 1e-4).double().mean(), (values <= at + 1e-4).double().mean()
        assert below - SLACK <= level <= not_above + SLACK, (mark, at, below)


@pytest.mark.parametrize(("batch", "length", "calls"), [(256, 128, 1), (64, 96, 4), (1, 128, 40)])
def test_the_percentiles_of_a_batch_are_those_of_all_its_rows(batch, length, calls):
    record, w_max, visible = watched(batch, length, calls, alerts=None)
    assert record.forward["w_max"].rows == w_max.numel()
    assert_quantiles(record.forward["w_max"], w_max)
    assert_quantiles(record.forward["visible"], visible)
    assert record.forward["w_max"].mean == pytest.approx(w_max.mean().item(), rel=1e-4)


def test_the_median_of_n_is_that_of_the_issue():
    attention, x = (
        ScaledDotProductAttention("log"),
        torch.randn(256, 1, 128, 8, generator=torch.Generator().manual_seed(0)),
    )
    with Monitor(attention, every=1, alerts=None) as monitor:  # 64 sampled rows of each sequence
        attention(x, x, x, is_causal=True)
        (record,) = monitor.step(0)
    assert record.forward["visible"].p50 == pytest.approx(64.5, abs=128 * SLACK)


def test_a_median_is_not_moved_by_the_sample():
    record, w_max, _ = watched(256, 128)
    assert w_max.median() < 0.6
    assert record.forward["w_max"].p50 < 0.65


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=2, max_size=6), st.integers(0, 2**32), st.randoms())
def test_merged_parts_hold_the_sample_of_the_whole(sizes, salt, random):
    generator = torch.Generator().manual_seed(salt)
    rows = torch.randint(-999, 999, (3, 2, sum(sizes)), generator=generator).float()  # whose sums are exact
    keys = row_keys(salt_of(salt), sum(sizes), CPU)
    whole = Spread.of(rows, keys)
    parts = [Spread.of(*part) for part in zip(rows.split(sizes, dim=-1), keys.split(sizes), strict=True)]
    random.shuffle(parts)
    while len(parts) > 1:
        parts.append(parts.pop().merge(parts.pop(0)))
    (merged,) = parts
    assert merged.keys.sort().values.tolist() == whole.keys.sort().values.tolist()
    assert torch.equal(merged.sample.sort().values, whole.sample.sort().values)
    assert whole.keys.shape[0] == min(sum(sizes), KEPT)
    assert torch.equal(merged.number, whole.number)
    assert torch.equal(merged.total, whole.total)


def test_every_row_is_as_likely_as_any_other_to_be_kept():
    rows, draws = 4 * KEPT, 200
    kept = torch.zeros(rows)
    for step in range(draws):
        keys = row_keys(salt_of(step, 0, 1), rows, CPU)
        kept[keys.topk(KEPT, largest=False).indices] += 1
    expected = draws / 4
    chi_squared = ((kept - expected) ** 2 / (expected * 3 / 4)).sum()
    assert abs(chi_squared - rows) < 5 * (2 * rows) ** 0.5
    # Nor does the place of a row tell: the same over blocks of rows of one sequence.
    assert (kept.view(-1, 64).mean(0) - expected).abs().max() < 5 * (expected * 3 / 4 / (rows / 64)) ** 0.5


def test_keys_of_calls_steps_and_processes_are_different_and_repeatable():
    keys = {numbers: row_keys(salt_of(*numbers), 64, CPU) for numbers in [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1)]}
    assert torch.equal(keys[0, 0, 1], row_keys(salt_of(0, 0, 1), 64, CPU))
    assert torch.cat(list(keys.values())).unique().numel() == 4 * 64
    assert all(0 <= int(found.min()) <= int(found.max()) < 2**32 for found in keys.values())


@pytest.mark.parametrize("sizes", [[4000, 40, 400], [64] * 16, [5000] + [10] * 15])
def test_processes_count_by_their_rows(sizes):
    """One with many small numbers and some with a few large ones, each of which sends as many rows."""
    sample, levels = max(8, 512 // len(sizes)), []
    values = [torch.linspace(index, index + 1, size) for index, size in enumerate(sizes)]
    for draw in range(40):
        flats = [
            Spread.flat([Spread.of(x.view(1, 1, -1), row_keys(salt_of(draw, rank, 1), x.shape[0], CPU))], sample)
            for rank, x in enumerate(values)
        ]
        ((summary,),) = summaries(torch.stack(flats))
        assert summary.rows == sum(sizes)
        levels.append([(torch.cat(values) <= mark).double().mean().item() for mark in summary[1:4]])
    found = torch.tensor(levels).mean(0)
    deviation = 0.5 / (40 * sample) ** 0.5
    assert (found - torch.tensor([0.1, 0.5, 0.9])).abs().max() < 4 * deviation + 1 / sum(sizes)


def test_whole_samples_of_processes_give_the_quantiles_of_all_rows():
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 17, 40)]
    parts[1][3] = torch.nan  # a row that does not count
    flats = [Spread.flat([Spread.of(x.view(1, 1, -1), row_keys(1, x.shape[0], CPU))], 64) for x in parts]
    ((summary,),) = summaries(torch.stack(flats))
    truth = torch.cat(parts).nanquantile(torch.tensor([0.1, 0.5, 0.9]))
    assert summary[1:4] == pytest.approx(truth.tolist(), rel=1e-5)


def test_padding_takes_no_place_in_a_sample():
    rows = torch.full((1, 1, 100 * KEPT), torch.nan)
    rows[..., ::100] = torch.arange(KEPT, dtype=torch.float32)
    found = Spread.of(rows, row_keys(salt_of(0), rows.shape[-1], CPU))
    assert found.sample.flatten().sort().values.tolist() == list(range(KEPT))


@pytest.mark.parametrize(("queries", "rows"), [(96, 64), (65, 64), (100, 64), (9, 4), (64, 64), (3, 64)])
def test_every_query_row_is_as_likely_as_any_other_to_be_looked_at(queries, rows):
    draws = 1500
    looked_at = torch.zeros(queries)
    for seed in range(draws):
        chosen = sample_rows(queries, rows, seed, CPU)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        looked_at[chosen] += 1
    share = min(rows, queries) / queries
    deviation = (draws * share * (1 - share)) ** 0.5
    assert (looked_at - draws * share).abs().max() <= 5 * deviation
    assert (looked_at @ torch.arange(1.0, queries + 1) / looked_at.sum() - (queries + 1) / 2).abs() < 0.2
