"""`document_ids` with a `cache_offset` past the keys is refused, or shows nothing where only the device knows it."""

import pytest
import torch

from attnscale import scaled_dot_product_attention, visible_keys
from attnscale.errors import ArgumentError

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1])


def test_an_offset_past_the_keys_is_refused_by_its_name():
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(ArgumentError, match="cache_offset=5 is not accepted: expected at most 4: 2 queries among 6"):
        scaled_dot_product_attention(x[:, :, :2], x, x, document_ids=DOCUMENTS, cache_offset=5, policy="log")


def test_a_query_behind_the_last_key_is_in_no_document():
    offsets = torch.tensor([3, 5])
    n = visible_keys(2, 6, batch=2, document_ids=DOCUMENTS, cache_offset=offsets, is_causal=True)
    assert n[:, 0].tolist() == [[1, 2], [3, 0]]
    x = torch.randn(2, 2, 6, 8)
    out = scaled_dot_product_attention(
        x[:, :, :2], x, x, document_ids=DOCUMENTS, cache_offset=offsets, is_causal=True, policy="log"
    )
    assert (out[1, :, 1] == 0).all()
    assert torch.isfinite(out).all()
