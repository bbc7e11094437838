"""The decoding kernel as a provider: keys split over programs."""

from __future__ import annotations

from torch import Tensor

from attnscale.bench.gpu.problem import Problem
from attnscale.bench.gpu.provider import Answer, Attention, Provider, by_law


def split(problem: Problem) -> Attention:
    """A cache in one piece."""
    from attnscale_kernels import Visibility
    from attnscale_kernels.decode.op import decode_attention

    beta = problem.temperature()[None, None]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Answer:
        return Answer(decode_attention(query, key, value, beta, Visibility(), scale=problem.dim**-0.5).out)

    return attend


DECODING = (Provider("attnscale_split", split, by_law, ours=True),)
