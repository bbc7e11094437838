"""`winner` and `first_share` of every row, whatever hides keys and whoever computes them, against fp64 written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attnscale import (
    ArgumentError,
    ArgumentTypeError,
    RowStats,
    StatsRequest,
    attention_with_stats,
    build_policy,
    row_statistics,
)
from attnscale.statistics.rows import tiles

BATCH, HEADS, KV_HEADS, KEYS, DIM = 2, 4, 2, 13, 8
SCALE = 0.6
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(11)
SEEN = torch.rand(BATCH, HEADS, KEYS, KEYS, generator=GENERATOR) < 0.5
SEEN[0, 1, 5] = SEEN[1, 2, 0] = False  # rows that see nothing
BIAS = torch.randn(BATCH, HEADS, KEYS, KEYS, generator=GENERATOR, dtype=torch.float64)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 9, [0] * 1 + [1] * 6 + [2] * 6])
EDGES = [0, 3, 4, KEYS]
LEFT = torch.arange(KEYS) < torch.tensor([[5], [0]])
RIGHT = torch.arange(KEYS) >= torch.tensor([[KEYS], [6]])
HOLES = torch.rand(BATCH, KEYS, generator=GENERATOR) < 0.4
SLOTS = torch.tensor([[2, 3, 7], [0, 9, 12]])

# What a row in slot `own` of a sequence may see of a key.
Sees = Callable[[int, int, int, int], bool]  # (sequence, head, own, key)


class Rule(NamedTuple):
    """Keywords of a call, and the same in plain words."""

    keywords: dict[str, Any]
    sees: Sees
    own: list[list[int]] = [list(range(KEYS))] * BATCH  # the slots of the queries
    bias: Tensor | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def causal(b: int, h: int, own: int, key: int) -> bool:
    return key <= own


def document(edges: list[int], slot: int) -> int:
    return max(number for number, edge in enumerate(edges) if edge <= slot)


LAST = [list(range(KEYS - 4, KEYS))] * BATCH
RULES = {
    "full": Rule({}, lambda b, h, own, key: True),
    "causal": Rule({"is_causal": True}, causal),
    "window": Rule({"is_causal": True, "window": 4}, lambda b, h, own, key: own - 4 < key <= own),
    "two-sided window": Rule({"window": (1, 3)}, lambda b, h, own, key: own - 1 <= key <= own + 3),
    "left padding": Rule(
        {"is_causal": True, "key_padding": LEFT}, lambda b, h, own, key: key <= own and not LEFT[b, key]
    ),
    "right padding": Rule({"key_padding": RIGHT}, lambda b, h, own, key: not RIGHT[b, key]),
    "padding with holes and a window": Rule(
        {"window": (5, 2), "key_padding": HOLES}, lambda b, h, own, key: own - 5 <= key <= own + 2 and not HOLES[b, key]
    ),
    "all padding": Rule({"key_padding": torch.arange(2)[:, None].expand(2, KEYS) == 1}, lambda b, h, own, key: b == 0),
    "documents": Rule({"document_ids": DOCUMENTS[0]}, lambda b, h, own, key: DOCUMENTS[0, own] == DOCUMENTS[0, key]),
    "own documents": Rule(
        {"is_causal": True, "document_ids": DOCUMENTS},
        lambda b, h, own, key: key <= own and DOCUMENTS[b, own] == DOCUMENTS[b, key],
    ),
    "packed": Rule(
        {"is_causal": True, "cu_seqlens": torch.tensor(EDGES)},
        lambda b, h, own, key: key <= own and document(EDGES, own) == document(EDGES, key),
    ),
    "packed and padded": Rule(
        {"cu_seqlens": torch.tensor(EDGES), "key_padding": HOLES},
        lambda b, h, own, key: document(EDGES, own) == document(EDGES, key) and not HOLES[b, key],
    ),
    "mask": Rule({"attn_mask": SEEN[0, 0]}, lambda b, h, own, key: SEEN[0, 0, own, key]),
    "mask per head": Rule({"attn_mask": SEEN}, lambda b, h, own, key: SEEN[b, h, own, key]),
    "mask of keys": Rule({"attn_mask": ~HOLES[:, None, None]}, lambda b, h, own, key: not HOLES[b, key]),
    "mask per head and causal": Rule(
        {"attn_mask": SEEN[:1], "is_causal": True}, lambda b, h, own, key: key <= own and SEEN[0, h, own, key]
    ),
    "bias with -inf": Rule(
        {"attn_mask": BIAS.masked_fill(~SEEN, -math.inf)}, lambda b, h, own, key: SEEN[b, h, own, key], bias=BIAS
    ),
    "bias with finfo.min": Rule(
        {"attn_mask": BIAS[:, :1].masked_fill(~SEEN[:, :1], torch.finfo(torch.float32).min), "window": (6, None)},
        lambda b, h, own, key: SEEN[b, 0, own, key] and key >= own - 6,
        bias=BIAS[:, :1],
    ),
    "cache": Rule({"is_causal": True, "cache_offset": KEYS - 4}, causal, LAST),
    "caches": Rule(
        {"is_causal": True, "cache_offset": torch.tensor([2, KEYS - 4])}, causal, [[2, 3, 4, 5], LAST[0]]
    ),
    "slots": Rule({"is_causal": True, "cache_offset": SLOTS}, causal, SLOTS.tolist()),
    "one token": Rule(
        {"is_causal": True, "cache_offset": KEYS - 1, "key_padding": LEFT},
        lambda b, h, own, key: not LEFT[b, key],
        [[KEYS - 1]] * BATCH,
    ),
    "softcap": Rule({"is_causal": True, "softcap": 0.7}, causal, softcap=0.7),
    "sinks": Rule({"is_causal": True, "sinks": SINKS}, causal, sinks=SINKS),
    "everything": Rule(
        {
            "is_causal": True, "window": 7, "key_padding": LEFT, "softcap": 0.7, "sinks": SINKS,
            "attn_mask": BIAS.masked_fill(~SEEN, -math.inf),
        },
        lambda b, h, own, key: own - 7 < key <= own and not LEFT[b, key] and bool(SEEN[b, h, own, key]),
        bias=BIAS, softcap=0.7, sinks=SINKS,
    ),
}  # fmt: skip
rules = pytest.mark.parametrize("name", RULES)
shares = pytest.mark.parametrize("first", [1, 3, 50])


def inputs(rule: Rule, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (BATCH, HEADS, len(rule.own[0]), DIM), (BATCH, KV_HEADS, KEYS, DIM), (BATCH, KV_HEADS, KEYS, DIM)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


class Expected(NamedTuple):
    """Of rows [B, H, Tq]."""

    logits: Tensor  # [B, H, Tq, Tk], −∞ where hidden
    winner: Tensor
    share: Tensor


@cache
def table(name: str) -> Tensor:
    """Which key each row sees, [B, H, Tq, Tk], one pair at a time."""
    rule = RULES[name]
    sees = [
        [[[bool(rule.sees(b, h, own, key)) for key in range(KEYS)] for own in rule.own[b]] for h in range(HEADS)]
        for b in range(BATCH)
    ]
    return torch.tensor(sees)


def expected(name: str, q: Tensor, k: Tensor, first: int, beta: float | Tensor = 1.0) -> Expected:
    """In fp64, of the whole matrix of scores. A tensor is β by the number of visible keys."""
    rule, seen = RULES[name], table(name)
    scores = SCALE * torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double().repeat_interleave(HEADS // KV_HEADS, 1))
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.bias is not None:
        scores = scores + rule.bias.to(torch.promote_types(q.dtype, torch.float32)).double()
    factor = beta[seen.sum(-1)][..., None] if isinstance(beta, Tensor) else beta
    logits = (factor * scores).masked_fill(~seen, -math.inf)
    return Expected(logits, *summed_up(logits, seen, first, rule.sinks))


def summed_up(logits: Tensor, seen: Tensor, first: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Winner and share of the first keys, from the logits of the keys that are seen."""
    powers, of_sink = logits.exp(), 0.0 if sinks is None else sinks.exp()[:, None]
    total = powers.sum(-1) + of_sink
    winner = torch.full(logits.shape[:-1], -1)
    share = torch.zeros(logits.shape[:-1], dtype=torch.float64)
    for place in itertools.product(*map(range, winner.shape)):
        keys = seen[place].nonzero()[:, 0].tolist()
        if keys:
            row = logits[place].tolist()
            winner[place] = max(keys, key=lambda key, row=row: (row[key], -key))
            share[place] = powers[place][keys[:first]].sum() / total[place]
    return winner, share


def assert_right(stats: RowStats, true: Expected, dtype: torch.dtype = torch.float64) -> None:
    """In fp64 the same key; else one whose logit is as large but for rounding (of fp32, in which scores are made)."""
    if stats.rows is not None:
        true = Expected(*(x.index_select(2, stats.rows) for x in true))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert stats.winner is not None
    assert stats.first_share is not None
    assert stats.winner.dtype == torch.int64
    assert stats.first_share.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert stats.winner.shape == stats.first_share.shape == true.winner.shape
    assert torch.equal(stats.winner < 0, true.winner < 0)
    best, found = (true.logits.gather(-1, x.clamp(min=0)[..., None])[..., 0] for x in (true.winner, stats.winner))
    seeing = true.winner >= 0
    torch.testing.assert_close(found[seeing], best[seeing], rtol=tolerance, atol=tolerance)
    if dtype == torch.float64:
        assert torch.equal(stats.winner, true.winner)
    torch.testing.assert_close(stats.first_share.double(), true.share, rtol=tolerance, atol=tolerance)


def narrowed(keywords: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Sinks and additive masks in the dtype of the call; half precision keeps them in fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in keywords.items()}


@rules
@shares
@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_every_rule_in_fp64(name, first, backend):
    rule = RULES[name]
    q, k, v = inputs(rule)
    rows = None
    if backend == "sdpa":  # which has no statistics of its own, nor softcap and sinks
        rows = max(1, q.shape[2] - 1)
        backend = "auto" if rule.softcap is not None or rule.sinks is not None or rows == q.shape[2] else "sdpa"
    request = StatsRequest(winner=True, first_share=first, rows=rows)
    stats = attention_with_stats(
        q, k, v, scale=SCALE, enable_gqa=True, backend=backend, request=request, **rule.keywords
    ).stats
    assert (stats.rows is None) == (rows in (None, q.shape[2]))
    assert_right(stats, expected(name, q, k, first))


@rules
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("gaps", [None, "bracket"])
def test_every_rule_in_many_tiles(name, rows, gaps, monkeypatch):
    for limit, value in (("SCORES", 9), ("SAMPLED_SCORES", 5), ("ROWS", 6), ("ROWS_PER_HEAD", 3), ("LEAST_ROWS", 2)):
        monkeypatch.setattr(tiles, limit, value)
    q, k, v = inputs(RULES[name])
    request = StatsRequest(winner=True, first_share=3, rows=rows, accumulation=gaps)
    arguments = {"scale": SCALE, "enable_gqa": True, "backend": "blockwise", **RULES[name].keywords}
    assert_right(attention_with_stats(q, k, v, request=request, **arguments).stats, expected(name, q, k, 3))


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_every_rule_in_other_dtypes(name, dtype, backend):
    rule = RULES[name]
    q, k, v = inputs(rule, dtype)
    keywords = narrowed(rule.keywords, dtype)
    arguments = {"scale": SCALE, "enable_gqa": True, "backend": backend, **keywords}
    request = StatsRequest(winner=True, first_share=2)
    assert_right(attention_with_stats(q, k, v, request=request, **arguments).stats, expected(name, q, k, 2), dtype)


@pytest.mark.parametrize("name", ["causal", "left padding", "bias with -inf", "everything"])
@pytest.mark.parametrize("rows", [None, 5])
def test_the_kernels_give_them_too(name, rows):
    rule = RULES[name]
    q, k, v = inputs(rule, torch.float32)
    arguments = {"scale": SCALE, "enable_gqa": True, "backend": "triton", **narrowed(rule.keywords, torch.float32)}
    request = StatsRequest(winner=True, first_share=2, accumulation="bracket", rows=rows)
    stats = attention_with_stats(q, k, v, request=request, **arguments).stats
    assert_right(stats, expected(name, q, k, 2), torch.float32)


@rules
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_weights_are_those_at_the_temperature_of_the_policy(name, backend):
    rule = RULES[name]
    q, k, v = inputs(rule)
    law = build_policy("log")
    beta = law(torch.arange(KEYS + 1))
    arguments = {"scale": SCALE, "enable_gqa": True, "backend": backend, "policy": law, **rule.keywords}
    stats = attention_with_stats(q, k, v, request=StatsRequest(winner=True, first_share=3), **arguments).stats
    assert_right(stats, expected(name, q, k, 3, beta))


@pytest.mark.parametrize("beta", [1e-30, 1.0])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("gaps", [None, "bracket"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", [tiles.SCORES, 70], ids=["one tile", "tiles"])
def test_the_first_of_equal_keys_wins(beta, backend, gaps, dtype, scores, monkeypatch):
    """Keys have one component each, and queries the same in all: no rounding tells equal keys apart."""
    monkeypatch.setattr(tiles, "SCORES", scores)
    monkeypatch.setattr(tiles, "SAMPLED_SCORES", scores)
    generator = torch.Generator().manual_seed(0)
    size = torch.randint(-2, 3, (1, 1, 150), generator=generator)
    axis = torch.nn.functional.one_hot(torch.randint(DIM, (1, 1, 150), generator=generator), DIM)
    k = (axis * size[..., None]).to(dtype)
    q = torch.ones(1, 1, 150, DIM, dtype=dtype)
    q[:, :, 1::2] = -1.0
    request = StatsRequest(winner=True, first_share=1, accumulation=gaps)
    stats = attention_with_stats(
        q, k, k, is_causal=True, backend=backend, request=request, policy={"name": "constant", "beta": beta}
    ).stats
    for row, found in enumerate(stats.winner[0, 0].tolist()):
        logits = [int(size[0, 0, key]) * (-1) ** row for key in range(row + 1)]
        assert found == logits.index(max(logits)), row


def test_the_smallest_score_wins_where_the_temperature_is_negative():
    rule = RULES["causal"]
    q, k, v = inputs(rule)
    arguments = {"scale": -SCALE, "enable_gqa": True, "is_causal": True}
    stats = attention_with_stats(q, k, v, request=StatsRequest(winner=True, first_share=2), **arguments).stats
    assert_right(stats, expected("causal", q, k, 2, -1.0))


@pytest.mark.parametrize("backend", ["reference", "blockwise", "sdpa"])
def test_a_nan_that_a_row_sees_leaves_it_without_a_winner_and_a_hidden_one_does_not(backend):
    rule = RULES["left padding"]
    q, k, v = inputs(rule)
    true = expected("left padding", q, k, 3)
    k[0, :, 2] = math.nan  # padding
    k[1, 1, 4] = math.nan  # rows of the heads 2 and 3 from 4 on see it
    k[1, 0, 12] = math.inf  # seen by the last row only
    v[0, :, :2] = math.nan
    rows = KEYS - 1 if backend == "sdpa" else None
    request = StatsRequest(winner=True, first_share=3, rows=rows)
    stats = attention_with_stats(
        q, k, v, scale=SCALE, enable_gqa=True, backend=backend, request=request, **rule.keywords
    ).stats
    broken = torch.zeros(BATCH, HEADS, KEYS, dtype=torch.bool)
    broken[1, 2:, 4:] = True
    infinite = torch.zeros_like(broken)
    infinite[1, :2, -1] = True
    if stats.rows is not None:
        true = Expected(*(x[:, :, stats.rows] for x in true))
        broken, infinite = broken[..., stats.rows], infinite[..., stats.rows]
    assert (stats.winner[broken] == -1).all()
    assert stats.first_share[broken].isnan().all()
    fine = ~broken & ~infinite
    assert torch.equal(stats.winner[fine], true.winner[fine])
    torch.testing.assert_close(stats.first_share[fine], true.share[fine])


@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 0, dtype=torch.bool)], ids=["plain", "mask"])
@pytest.mark.parametrize("keys", [0, 1])
def test_rows_without_keys_or_with_one(backend, sinks, mask, keys):
    q, k = torch.randn(BATCH, HEADS, 3, DIM).double(), torch.randn(BATCH, HEADS, keys, DIM).double()
    mask = None if mask is None else torch.ones(3, keys, dtype=torch.bool)
    for rows in (None, 2):
        request = StatsRequest(winner=True, first_share=4, rows=rows)
        stats = attention_with_stats(q, k, k, attn_mask=mask, sinks=sinks, backend=backend, request=request).stats
        assert stats.winner.shape == stats.first_share.shape == (BATCH, HEADS, rows or 3)
        assert (stats.winner == keys - 1).all()
        share = 0.0 if not keys else 1.0
        if keys and sinks is not None:
            logit = (q * k).sum(-1) * DIM**-0.5
            share = torch.sigmoid(logit - sinks[:, None])
            share = share if rows is None else share[..., stats.rows]
        torch.testing.assert_close(stats.first_share, torch.as_tensor(share).double().expand_as(stats.first_share))


OTHERS = ("w_max", "entropy", "lse", "max_logit")


@pytest.mark.parametrize("backend", ["reference", "blockwise", "triton", "auto"])
@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_they_need_no_other_statistic_and_bring_none(backend, rows, grad):
    rule = RULES["causal"]
    q, k, v = (x.float().requires_grad_(grad) for x in inputs(rule))
    nothing = dict.fromkeys(OTHERS, False)
    arguments = {"scale": SCALE, "enable_gqa": True, "backend": backend, **rule.keywords}
    true = expected("causal", q.detach(), k.detach(), 2)
    both = attention_with_stats(
        q, k, v, request=StatsRequest(winner=True, first_share=2, rows=rows, **nothing), **arguments
    ).stats
    assert_right(both, true, torch.float32)
    assert not both.first_share.requires_grad
    for asked in ({"winner": True}, {"first_share": 2}):
        alone = attention_with_stats(q, k, v, request=StatsRequest(rows=rows, **asked, **nothing), **arguments).stats
        (name,) = asked
        assert torch.equal(getattr(alone, name), getattr(both, name))
        left_out = {"winner", "first_share", *OTHERS, "gap_counts", "accumulation", "criticality"} - {name}
        assert all(getattr(alone, other) is None for other in left_out)
    unasked = attention_with_stats(q, k, v, request=StatsRequest(rows=rows), **arguments).stats
    assert unasked.winner is None
    assert unasked.first_share is None


def test_other_shapes_of_tensors_have_statistics_of_theirs():
    q = torch.randn(3, 5, 7, 2, DIM).movedim(3, 1)  # [3, 2, 5, 7, D]: heads in the middle
    request = StatsRequest(winner=True, first_share=2)
    stats = attention_with_stats(q, q, q, request=request).stats
    assert stats.winner.shape == stats.first_share.shape == q.shape[:-1]
    flat = attention_with_stats(*3 * (q.reshape(6, 5, 7, DIM),), request=request).stats
    assert torch.equal(stats.winner.reshape(6, 5, 7), flat.winner)
    torch.testing.assert_close(stats.first_share.reshape(6, 5, 7), flat.first_share)
    one = attention_with_stats(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0], request=request).stats  # without heads
    assert torch.equal(one.winner, stats.winner[0, 0, 0])


# Of a matrix.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [1, 4, 50])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
def test_a_matrix_of_scores_has_them(dtype, first, sinks):
    scores = BIAS[:, :, :5].to(dtype)
    mask = SEEN[:, :, :5].clone()
    mask[1, 3, 2] = False
    beta = torch.linspace(-1.5, 2.5, 5).double()
    request = StatsRequest(winner=True, first_share=first)
    stats = row_statistics(scores, beta, mask, request, sinks=sinks)
    logits = (beta[:, None] * scores.double()).masked_fill(~mask, -math.inf)
    assert_right(stats, Expected(logits, *summed_up(logits, mask, first, sinks)), dtype)


def test_a_matrix_without_columns_or_with_a_nan_has_rows_without_a_winner():
    request = StatsRequest(winner=True, first_share=2)
    empty = row_statistics(torch.zeros(3, 0), request=request)
    assert empty.winner.tolist() == [-1, -1, -1]
    assert empty.first_share.tolist() == [0.0, 0.0, 0.0]
    scores = torch.zeros(2, 4)
    scores[0, 3] = math.nan
    hidden = torch.tensor([[True, True, True, False], [False, True, True, True]])
    assert row_statistics(scores, request=request).winner.tolist() == [-1, 0]
    assert row_statistics(scores, mask=hidden, request=request).winner.tolist() == [0, 1]
    torch.testing.assert_close(
        row_statistics(scores, mask=hidden, request=request).first_share, torch.tensor([2 / 3, 2 / 3])
    )
    assert row_statistics(scores, request=request).first_share[0].isnan()


# Ways to run a call.


@pytest.mark.parametrize("rule", ["left padding", "window", "everything"])
@pytest.mark.parametrize(("backend", "compiler"), [("blockwise", "aot_eager"), ("reference", "eager")])
def test_they_compile_into_one_graph(rule, backend, compiler):
    torch.compiler.reset()
    rule = RULES[rule]
    q, k, v = inputs(rule)
    request = StatsRequest(winner=True, first_share=2)
    arguments = {"enable_gqa": True, "policy": "log", "backend": backend, "request": request, **rule.keywords}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> RowStats:
        return attention_with_stats(q, k, v, **arguments).stats

    plain, compiled = attend(q, k, v), torch.compile(attend, fullgraph=True, backend=compiler)(q, k, v)
    assert torch.equal(plain.winner, compiled.winner)
    torch.testing.assert_close(plain.first_share, compiled.first_share, rtol=1e-12, atol=1e-12)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("rule", ["causal", "left padding", "window", "mask per head", "sinks"])
def test_vmap_gives_those_of_each_call(backend, rule):
    q, k, v = inputs(RULES[rule])
    batch = torch.stack([q, 2 * q, -q])
    request = StatsRequest(winner=True, first_share=2)

    def attend(q: Tensor) -> tuple[Tensor, Tensor]:
        stats = attention_with_stats(
            q, k, v, enable_gqa=True, backend=backend, request=request, **RULES[rule].keywords
        ).stats
        return stats.winner, stats.first_share

    winner, share = torch.vmap(attend)(batch)
    for number, alone in enumerate(map(attend, batch)):
        assert torch.equal(winner[number], alone[0])
        torch.testing.assert_close(share[number], alone[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rows", [None, 2])
def test_they_have_shapes_without_values(rule, rows):
    request = StatsRequest(winner=True, first_share=2, rows=rows)
    arguments = {"enable_gqa": True, "policy": "log", "request": request}
    on_cpu = attention_with_stats(*inputs(RULES[rule]), **arguments, **RULES[rule].keywords).stats
    keywords = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in RULES[rule].keywords.items()}
    meta = attention_with_stats(*(x.to("meta") for x in inputs(RULES[rule])), **arguments, **keywords).stats
    found = [meta]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in inputs(RULES[rule])]
        found.append(attention_with_stats(*fake, **arguments, **RULES[rule].keywords).stats)
    for stats in found:
        for name in ("winner", "first_share"):
            got, true = getattr(stats, name), getattr(on_cpu, name)
            assert (got.shape, got.dtype) == (true.shape, true.dtype), name


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_under_autocast_they_are_those_of_rounded_inputs_in_fp32(backend, rows, name):
    rule = RULES[name]
    q, k, v = inputs(rule, torch.float32)
    request = StatsRequest(winner=True, first_share=2, rows=rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = attention_with_stats(
            q, k, v, scale=SCALE, enable_gqa=True, backend=backend, request=request, **rule.keywords
        ).stats
    true = expected(name, q.bfloat16(), k.bfloat16(), 2)
    assert_right(stats, true, torch.bfloat16)


# Requests and merging.


@pytest.mark.parametrize("given", [0, -1, True, False, 1.5, "x", [2], math.nan])
def test_a_number_of_first_keys_that_is_none_is_refused(given):
    with pytest.raises(
        (ArgumentError, ArgumentTypeError), match=r"first_share=.* is not accepted: expected an int >= 1 or None"
    ):
        StatsRequest(first_share=given)


@pytest.mark.parametrize("given", [1, "yes", None, torch.tensor(True)])
def test_a_winner_is_asked_for_by_a_bool(given):
    with pytest.raises(ArgumentTypeError, match=r"winner=.* is not accepted: expected True or False"):
        StatsRequest(winner=given)


PARTS = (slice(0, 5), slice(5, 6), slice(6, KEYS))


def part(scores: Tensor, keys: slice, **left_out: bool) -> RowStats:
    """Statistics of some columns of a matrix, numbered as in the whole."""
    stats = row_statistics(scores[..., keys], request=StatsRequest(winner=True, **left_out))
    return stats._replace(winner=torch.where(stats.winner < 0, -1, stats.winner + keys.start))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_the_winner_of_merged_parts_is_that_of_the_whole_in_any_order(order):
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (200, KEYS), generator=generator).double()  # with many ties
    scores[0] = math.nan
    for row, column in ((1, 0), (2, 5), (3, 12)):  # in one of the parts
        scores[row, column] = math.nan
    whole = row_statistics(scores, request=StatsRequest(winner=True))
    first, second, third = (part(scores, PARTS[place]) for place in order)
    merged = first.merge(second).merge(third)
    assert torch.equal(merged.winner, whole.winner)
    assert merged.winner[:4].tolist() == [-1] * 4
    assert merged.first_share is None


def test_rows_that_see_keys_in_one_part_only_have_the_winner_of_that_part():
    scores = torch.full((2, KEYS), -1.0)
    mask = torch.zeros(2, KEYS, dtype=torch.bool)
    mask[0, 7] = True
    request = StatsRequest(winner=True)
    left, right = (
        row_statistics(scores[:, keys], mask=mask[:, keys], request=request) for keys in (PARTS[0], PARTS[2])
    )
    assert left.merge(right).winner.tolist() == right.merge(left).winner.tolist() == [1, -1]


def test_winners_are_merged_with_what_compares_them_or_not_at_all():
    scores = torch.randn(3, KEYS)
    with pytest.raises(ArgumentError, match="winner without max_logit is not accepted"):
        part(scores, PARTS[0], max_logit=False).merge(part(scores, PARTS[2], max_logit=False))
    without = row_statistics(scores[:, PARTS[2]])
    for pair in ((part(scores, PARTS[0]), without), (without, part(scores, PARTS[0]))):
        with pytest.raises(ArgumentError, match="winner is not accepted on one side only"):
            pair[0].merge(pair[1])
    shares = [row_statistics(scores[:, keys], request=StatsRequest(first_share=2)) for keys in PARTS[:2]]
    assert shares[0].merge(shares[1]).first_share is None
