"""Blocks and pieces of `CallRows`: every score that a row sees is in one tile and no more, whatever the limits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnscale.attention import bind
from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.gaps import HIDDEN
from attnscale.statistics.rows import tiles
from attnscale.statistics.rows.tiles import Block, CallRows

LIMITS = ("SCORES", "SAMPLED_SCORES", "ROWS", "ROWS_PER_HEAD", "LEAST_ROWS")


@st.composite
def calls(draw: st.DrawFn) -> AttentionCall:
    """A small call with some of the rules by which keys are hidden."""
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q = torch.randn(batch, kv_heads * group, queries, 2, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, keys, 2, generator=generator, dtype=torch.float64)
    distance = st.none() | st.integers(0, 4)
    rules: dict[str, Any] = {"is_causal": draw(st.booleans()), "softcap": draw(st.none() | st.just(2.0))}
    rules["window"] = draw(st.none() | st.tuples(distance, st.just(0) if rules["is_causal"] else distance))
    if draw(st.booleans()):
        rules["key_padding"] = torch.rand(draw(st.sampled_from([1, batch])), keys, generator=generator) < 0.4
    cached = draw(st.sampled_from(["no", "one", "each", "slots", "documents"]))
    if cached == "one":
        rules["cache_offset"] = draw(st.integers(0, 9))
    elif cached == "each":
        rules["cache_offset"] = torch.randint(0, 9, (batch,), generator=generator)
    elif cached == "slots":
        rules["cache_offset"] = torch.randint(0, 12, (batch, queries), generator=generator)
    elif cached == "documents" and queries == keys:
        rules["document_ids"] = (torch.rand(batch, keys, generator=generator) < 0.3).cumsum(-1)
    shape = draw(st.sampled_from([None, (1, 1), (batch, 1), (1, kv_heads * group), (batch, kv_heads * group)]))
    if shape is not None:
        mask = torch.rand(*shape, queries, keys, generator=generator)
        rules["attn_mask"] = mask < 0.5 if draw(st.booleans()) else mask.double().masked_fill(mask < 0.5, -math.inf)
    return bind(q, k, k, enable_gqa=group > 1, **rules).call


limits = st.tuples(st.integers(1, 200), st.integers(1, 100), st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))


def visible(call: AttentionCall) -> Tensor:
    """[B, H, Tq, Tk]."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    dense = call.context.dense()
    return torch.ones(shape, dtype=torch.bool) if dense is None else dense.expand(shape)


def raw_scores(call: AttentionCall) -> Tensor:
    scores = call.query @ call.key.repeat_interleave(call.group, 1).mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores if call.bias is None else scores + call.bias


def assert_pieces(block: Block) -> list[Block]:
    """Neighbours of at most `width` slots, which hold all of the block and have its rows."""
    pieces = list(block.pieces())
    assert pieces[0].left == block.left
    assert pieces[-1].right == block.right
    assert all(one.right == other.left for one, other in itertools.pairwise(pieces))
    for piece in pieces:
        assert piece.left < piece.right <= piece.left + block.width
        assert piece[:6] == block[:6]
        clear = set(range(piece.clear_left, piece.clear_right))
        own = set(range(piece.left, piece.right))
        assert clear == own & set(range(block.clear_left, block.clear_right))
    return pieces


@settings(deadline=None, max_examples=150)
@given(calls(), limits, st.booleans())
def test_every_visible_score_is_in_one_tile(call, sizes, whole):
    seen, truth = visible(call), raw_scores(call)
    visited = torch.zeros(seen.shape, dtype=torch.int64)
    start, stop = (x.expand(call.query.shape[0], -1) for x in call.context.bounds())
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(LIMITS, sizes, strict=True):
            patch.setattr(tiles, name, size)
        rows = CallRows(call)
        most = tiles.SAMPLED_SCORES if call.query.shape[2] < tiles.ROWS_PER_HEAD else tiles.SCORES
        for block in rows.blocks(whole=whole):
            pieces = assert_pieces(block)
            if whole and call.key.shape[2] * call.group <= most:
                assert len(pieces) == 1
            for piece in pieces:
                heads = slice(piece.first * call.group, piece.last * call.group)
                place = slice(piece.begin, piece.end), heads, slice(piece.top, piece.bottom)
                for slot in range(piece.clear_left, piece.clear_right):
                    assert (start[place[0], place[2]] <= slot).all()
                    assert (stop[place[0], place[2]] > slot).all()
                visited[place][..., piece.left : piece.right] += 1
                got = rows.scores(piece)
                assert got.numel() <= most or piece.right - piece.left == 1
                shaped = got.reshape((*truth[place].shape[:3], -1))
                hidden = ~seen[place][..., piece.left : piece.right]
                assert (shaped[hidden] == HIDDEN).all()
                torch.testing.assert_close(shaped[~hidden], truth[place][..., piece.left : piece.right][~hidden])
    assert (visited <= 1).all()
    assert (visited[seen] == 1).all()


@settings(deadline=None, max_examples=80)
@given(calls(), limits, st.booleans(), st.booleans())
def test_what_is_written_by_tile_and_read_by_tile_is_the_same(call, sizes, whole, on_host):
    """`store`, `add` and `rows_of` address the same rows, also where bounds are on a device that is not waited for."""
    generator = torch.Generator().manual_seed(0)
    source = torch.rand(call.query.shape, generator=generator, dtype=torch.float64)
    target, total = torch.zeros_like(source), torch.zeros_like(source)
    seen = visible(call)
    visited = torch.zeros(seen.shape, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(LIMITS, sizes, strict=True):
            patch.setattr(tiles, name, size)
        rows = CallRows(call)
        if not on_host:
            rows._start, rows._stop = (bound.to("meta") for bound in (rows._start, rows._stop))
        for block in rows.blocks(whole=whole):
            part = rows.rows_of(source, block)
            rows.store(target, block, part)
            rows.add(total, block, part)
            if not on_host:
                assert block.clear_left >= block.clear_right  # which slots all rows see is not known
            for piece in assert_pieces(block):
                rows.place(visited, piece)[..., piece.left : piece.right] += 1
    assert (visited <= 1).all()
    assert (visited[seen] == 1).all()
    assert torch.equal(target, torch.where(visited.any(-1)[..., None], source, 0.0))
    assert torch.equal(total, target)
