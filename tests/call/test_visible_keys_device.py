"""`visible_keys` counts on the device of its rules, also where they come as a pair."""

import torch

from attnscale import visible_keys


def test_a_pair_of_edges_decides_the_device():
    edges = torch.tensor([0, 2, 5], device="meta"), torch.tensor([0, 3, 9], device="meta")
    assert visible_keys(5, 9, cu_seqlens=edges, is_causal=True).device.type == "meta"


def test_a_pair_is_counted_as_its_documents():
    edges = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 9])
    assert visible_keys(5, 9, cu_seqlens=edges, is_causal=True).tolist() == [[[2, 3, 4, 5, 6]]]
