"""What backward says of the rows of a call: the gradients of their logits and of β."""

from __future__ import annotations

import math
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.call.attention_call import AttentionCall
from attnscale.statistics.rows.call_tiles import Block, CallRows, clear_broken
from attnscale.statistics.rows.row_measures import RowMeasures
from attnscale.statistics.rows.score_tile import LOG2E, ScoreTile


class ScoreGradients(NamedTuple):
    """Of each row, [B, H, R]."""

    norm: Tensor  # of the gradient of its logits
    beta: Tensor  # the gradient of its β


class GradientTile(NamedTuple):
    """What the gradient of a tile's logits is made of."""

    scores: ScoreTile
    weights: Tensor  # [b, h, g, r, K], 0 where hidden
    pull: Tensor  # ⟨dO, v⟩ of each key, the gradient of its weight


def score_gradients(call: AttentionCall, upstream: Tensor, measures: RowMeasures) -> ScoreGradients:
    """From the gradient of the output [B, H, R, Dv] and the measures of the same rows.

    Dropout is not replayed: these are the gradients of the weights as they were before it.
    """
    rows = CallRows(call)
    gradient = rows.by_key_head(upstream)
    top = rows.by_key_head(measures.max_logit.masked_fill(measures.max_logit == -math.inf, 0.0) * LOG2E)
    w_max = rows.by_key_head(measures.w_max)
    found = rows.query.new_empty(*rows.query.shape[:4], 2)

    def make(block: Block) -> GradientTile:
        scores = rows.tile(block)
        weights = scores.logits.sub_(block.of(top)[..., None]).exp2_().mul_(block.of(w_max)[..., None])
        pull = rows.products(gradient, call.value, block, "pull")
        clear_broken(pull, scores.visible)
        return GradientTile(scores, weights, pull)

    for block in rows.blocks():
        tiles = block.passes(make)
        weighted = (tile.scores.compute("powers", torch.mul, tile.weights, tile.pull).sum(-1) for tile in tiles())
        centre = reduce(torch.add, weighted)[..., None]
        block.of(found).copy_(reduce(torch.add, (_parts(tile, centre) for tile in tiles())))
    squares, beta = found.flatten(1, 2).unbind(-1)
    return ScoreGradients(squares.sqrt(), beta)


def _parts(tile: GradientTile, centre: Tensor) -> Tensor:
    """Σ dℓ² and Σ dℓ·s of each row, [..., 2], with dℓ = weight·(pull − centre). It uses up the tile."""
    dlogits = tile.pull.sub_(centre).mul_(tile.weights)
    squares = torch.linalg.vector_norm(dlogits, dim=-1).square_()
    return torch.stack([squares, tile.scores.compute("powers", torch.mul, dlogits, tile.scores.raw).sum(-1)], dim=-1)
