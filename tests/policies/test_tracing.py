"""`torch.jit.trace` is rejected, as it would bake in one β; methods that keep β symbolic are accepted."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import AttnScaleError


class Decoding(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.attention = attnscale.ScaledDotProductAttention(policy)

    def forward(self, q, k, v):
        return self.attention(q, k, v)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.parametrize("rows", [1, 4])
def test_tracing_a_length_policy_is_refused_with_what_to_use_instead(rows):
    q, k = torch.randn(1, 2, rows, 8), torch.randn(1, 2, 16, 8)
    with pytest.raises(AttnScaleError, match=r"torch.jit.trace.*use torch.export"):
        torch.jit.trace(Decoding("log"), (q, k, k), check_trace=False)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
def test_tracing_a_constant_policy_holds_for_other_lengths():
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8)
    traced = torch.jit.trace(Decoding("constant"), (q, k, k), check_trace=False)
    longer = torch.randn(1, 2, 64, 8)
    torch.testing.assert_close(traced(q, longer, longer), Decoding("constant")(q, longer, longer))


def test_an_exported_program_knows_the_length_of_each_call():
    keys = torch.export.Dim("keys", min=2, max=4096)
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8)
    shapes = {"q": None, "k": {2: keys}, "v": {2: keys}}
    program = torch.export.export(Decoding("log"), (q, k, k), dynamic_shapes=shapes).module()
    for length in (16, 100, 1000):
        longer = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(program(q, longer, longer), Decoding("log")(q, longer, longer))
