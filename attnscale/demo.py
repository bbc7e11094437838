"""The demonstration: one small attention stack, five temperature laws, longer and longer contexts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnscale.convert import convert
from attnscale.policies import build_policy

LENGTHS = (64, 256, 1024, 4096)
LAWS: dict[str, dict[str, object]] = {
    "constant": {},
    "sqrt_log": {},
    "log": {},
    "log_squared": {},
    "power": {"exponent": 0.5},
}


class Measurement(NamedTuple):
    """One cell of the table: means over heads and rows of the last layer."""

    policy: str
    length: int
    beta: float
    w_max: float
    entropy: float


@torch.no_grad()
def measure(lengths: tuple[int, ...] = LENGTHS, rows: int = 64) -> list[Measurement]:
    """Swap each law into the same random two-layer stack and measure the last `rows` rows of its last layer.

    Each of these rows sees all keys, so that n is the length.
    """
    results = []
    for name, parameters in LAWS.items():
        for length in lengths:
            layers = attention_stack()
            generator = torch.Generator().manual_seed(length)
            x = torch.randn(1, length, layers[0].embed_dim, generator=generator)
            with convert(nn.ModuleList(layers), name, **parameters):
                x = nn.functional.normalize(x + layers[0](x, x, x, need_weights=False)[0], dim=-1)
                x = x * layers[0].embed_dim ** 0.5
                weights = layers[1](x[:, -rows:], x, x, average_attn_weights=False)[1]
            beta = float(build_policy(name, **parameters)(length))
            results.append(Measurement(name, length, beta, *concentration(weights)))
    return results


def attention_stack(width: int = 64, heads: int = 4, layers: int = 2) -> list[nn.MultiheadAttention]:
    """Random attention layers whose raw scores have variance near one, as those of a trained model have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stack = [nn.MultiheadAttention(width, heads, batch_first=True).eval() for _ in range(layers)]
        for layer in stack:
            nn.init.normal_(layer.in_proj_weight, std=width**-0.5)
    return stack


def concentration(weights: Tensor) -> tuple[float, float]:
    """Mean largest weight and mean entropy in nats of the rows of [..., Tk]."""
    return weights.amax(-1).mean().item(), torch.special.entr(weights).sum(-1).mean().item()
