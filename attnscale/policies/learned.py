"""Policies with trainable parameters: β from the position, or from the row's own query (`QueryPolicy`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale._util.processes import local
from attnscale._util.tracing import autocast_off
from attnscale.policies.base import LONGEST_USUAL_CONTEXT, LengthPolicy, QueryPolicy, ln, real
from attnscale.policies.fields import flag, length, not_negative, number, positive


@dataclass(eq=False, repr=False, kw_only=True)
class SSMax(LengthPolicy):
    """Scalable softmax (arXiv:2501.19399): s_h·ln(pos + 1), plus b_h with `bias=True`; s and b are [H] parameters.

    β is [..., H, Tq] for n [..., 1, Tq] or [Tq]. Uses the position, n − 1 if unknown. With `bias=True` it is the law of
    Mistral Large 4: `s` and `b` are the `scale` and `bias` of its `softmax_scaling`.

    Args:
        num_heads: The number of heads H.
        reference_length: The length with β = 1 at initialisation: s starts at 1/ln `reference_length`.
        init: The initial value of s, instead of 1/ln `reference_length` (0.43 and 1.0 are also in use).
        bias: Add a learned bias b, initialised to 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("ssmax", num_heads=2, reference_length=1024)(torch.tensor([32, 1024])).detach()
        tensor([[0.5000, 1.0000],
                [0.5000, 1.0000]])
    """

    name = "ssmax"
    uses_position = True
    num_heads: int = length(least=1)
    reference_length: int = length(2048)
    init: float | None = number("a number, or None for 1/ln reference_length", None)
    bias: bool = flag(False)

    def validate(self) -> None:
        self.s = nn.Parameter(torch.empty(self.num_heads))
        self.b = nn.Parameter(torch.empty(self.num_heads)) if self.bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the initial values, with β = 1 at the reference length unless `init` is given."""
        nn.init.constant_(self.s, self._start())
        if self.b is not None:
            nn.init.zeros_(self.b)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        log = ln(position + 1)
        # In the dtype of the logarithm: for an int n, which gives a 0-d tensor, type promotion would keep bf16.
        beta = local(self.s)[:, None].to(log.dtype) * log
        return beta if self.b is None else beta + local(self.b)[:, None]

    def longest_beta(self) -> float:
        # From the initial value: reading parameters would synchronise, and on the meta device they have no values.
        return abs(self._start()) * math.log(LONGEST_USUAL_CONTEXT)

    def _start(self) -> float:
        return 1 / math.log(self.reference_length) if self.init is None else self.init


@dataclass(eq=False, repr=False, kw_only=True)
class HeadScale(LengthPolicy):
    """HeadScale (arXiv:2404.12224): λ_h, learned per head and the same at every length; λ is an [H] parameter.

    β is [..., H, Tq] for n [..., 1, Tq] or [Tq].

    Args:
        num_heads: The number of heads H.
        init: The initial value of λ, > 0.

    Example:
        >>> from attnscale import build_policy
        >>> build_policy("head_scale", num_heads=2, init=1.2)(torch.tensor([32, 1024])).detach()
        tensor([[1.2000, 1.2000],
                [1.2000, 1.2000]])
    """

    name = "head_scale"
    num_heads: int = length(least=1)
    init: float = positive(1.0)

    def validate(self) -> None:
        self.scale = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset λ to `init`."""
        nn.init.constant_(self.scale, self.init)

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        return local(self.scale)[:, None] * torch.ones_like(real(n))

    def longest_beta(self) -> float:
        return self.init


@dataclass(eq=False, repr=False, kw_only=True)
class ASEntmax(QueryPolicy):
    """ASEntmax scale (arXiv:2506.16640): δ + softplus(w_β·x)·(ln(pos + 2))^(2·tanh(w_γ·x)), per head and token.

    x is the query vector [D] of the head; w_β and w_γ are [H, D] parameters. They start at zero, where β = δ + ln 2 at
    every length. β is [B, H, Tq] for queries [B, H, Tq, D]. Uses the position, n − 1 if unknown. Left out: α-entmax in
    place of softmax.

    Args:
        num_heads: The number of heads H.
        head_dim: The head dimension D.
        delta: δ ≥ 0.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("asentmax", num_heads=4, head_dim=8)
        >>> policy(torch.tensor([5, 6, 7]), query=torch.randn(2, 4, 3, 8)).shape
        torch.Size([2, 4, 3])
    """

    name = "asentmax"
    uses_position = True
    delta: float = not_negative(1.0)

    def validate(self) -> None:
        self.w_beta = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.w_gamma = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the initial values, with β = δ + ln 2 at every length."""
        nn.init.zeros_(self.w_beta)
        nn.init.zeros_(self.w_gamma)

    def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
        strength = F.softplus(_dot(q, self.w_beta))
        exponent = 2 * torch.tanh(_dot(q, self.w_gamma))
        return self.delta + strength * ln(position + 2).to(q.dtype).pow(exponent)

    def longest_beta(self) -> float:
        # For typical maxima: strength 1, exponent 2.
        return self.delta + math.log(LONGEST_USUAL_CONTEXT) ** 2


@dataclass(eq=False, repr=False, kw_only=True)
class Selective(QueryPolicy):
    """Selective self-attention (arXiv:2411.12892): tanh(w·gelu(x)) + 1 + σ(α)·ln n, per head and token.

    x is the query vector [D] of the head, so the temperature needs no projection of its own. w, of shape [H, D], starts
    at zero and α [H] at σ(α) = `strength`. The token term is that of reimplementations: the released code has the
    position term only, with exp(−exp b) in place of σ(α). β is [B, H, Tq] for queries [B, H, Tq, D] and may be
    negative. Left out: the second temperature, on the values.

    Args:
        num_heads: The number of heads H.
        head_dim: The head dimension D.
        strength: The initial coefficient σ(α) of ln n, in (0, 1); by default exp(−exp 2), as in the released code.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("selective", num_heads=4, head_dim=8, strength=0.1)
        >>> policy(torch.tensor([1, 1024]), query=torch.randn(1, 4, 2, 8))[0, 0].detach()
        tensor([1.0000, 1.6931])
    """

    name = "selective"
    strength: float = number("a number in (0, 1)", math.exp(-math.exp(2.0)), above=0.0, below=1.0)

    def validate(self) -> None:
        self.w = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.alpha = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the initial values, with β = 1 + `strength`·ln n."""
        nn.init.zeros_(self.w)
        nn.init.constant_(self.alpha, math.log(self.strength / (1 - self.strength)))

    def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
        by_token = torch.tanh(_dot(F.gelu(q), self.w))
        return by_token + 1 + torch.sigmoid(_per_head(self.alpha, q)) * torch.log(real(n)).to(q.dtype)


@dataclass(eq=False, repr=False, kw_only=True)
class Moondream(QueryPolicy):
    """Moondream 3, a variant of `selective`: tanh(w·gelu(x)) + ½ + σ(α·ln(pos + 1)), per head and token.

    x is the query vector [D] of the head. w [H, D] and α [H] start at zero, where β = 1. β is [B, H, Tq] for queries
    [B, H, Tq, D] and may be negative. Uses the position, n − 1 if unknown. Left out: the columns of the released weight
    that read the other heads and the row's key and value, its use of the query before the rotary embedding, and the
    second temperature, on the values.

    Args:
        num_heads: The number of heads H.
        head_dim: The head dimension D.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("moondream", num_heads=4, head_dim=8)
        >>> policy(torch.tensor([1, 1024]), query=torch.randn(1, 4, 2, 8))[0, 0].detach()
        tensor([1., 1.])
    """

    name = "moondream"
    uses_position = True

    def validate(self) -> None:
        self.w = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.alpha = nn.Parameter(torch.empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to zero, with β = 1 at every length."""
        nn.init.zeros_(self.w)
        nn.init.zeros_(self.alpha)

    def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
        by_position = torch.sigmoid(_per_head(self.alpha, q) * torch.log(real(position + 1)).to(q.dtype))
        return torch.tanh(_dot(F.gelu(q), self.w)) + (1 + (by_position - 0.5))


@dataclass(eq=False, repr=False, kw_only=True)
class QASSMax(QueryPolicy):
    """Query-aware scalable softmax (arXiv:2602.11139, TabICLv2): base(ln n)_h·(1 + tanh(gate(x))), per head and token.

    x is the query vector [D] of the head; base maps ln n to H numbers and gate maps x to one. Both have one hidden GELU
    layer and are shared by the heads, except the last layer of base. β is [B, H, Tq] for queries [B, H, Tq, D] and may
    be negative. It starts at 1: the last layers start at zero, that of base with bias 1, where the released code keeps
    torch's initial values for base. Left out: the elementwise variant, with one factor per channel of the query, which
    is not a temperature.

    Args:
        num_heads: The number of heads H.
        head_dim: The head dimension D.
        hidden: The width of the hidden layers.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("qassmax", num_heads=4, head_dim=8)
        >>> policy(torch.tensor([1, 1024]), query=torch.randn(1, 4, 2, 8))[0, 0].detach()
        tensor([1., 1.])
    """

    name = "qassmax"
    shared_tensors: ClassVar[tuple[str, ...]] = (
        "base_in", "base_in_bias", "gate_in", "gate_in_bias", "gate_out", "gate_out_bias",
    )  # fmt: skip
    hidden: int = length(64, least=1)

    def validate(self) -> None:
        self.base_in, self.base_in_bias = _layer(self.hidden, 1)
        self.base_out, self.base_out_bias = _layer(self.num_heads, self.hidden)
        self.gate_in, self.gate_in_bias = _layer(self.hidden, self.head_dim)
        self.gate_out, self.gate_out_bias = _layer(1, self.hidden)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to the initial values, with β = 1: the same in every process, without torch's global random numbers."""
        generator = torch.Generator("cpu").manual_seed(0)
        for parameter in (self.base_in, self.base_in_bias, self.gate_in, self.gate_in_bias):
            inputs = 1 if parameter is self.base_in or parameter is self.base_in_bias else self.head_dim
            start = torch.empty(parameter.shape, device="cpu").uniform_(-1, 1, generator=generator)
            parameter.copy_(start / math.sqrt(inputs))
        for parameter in (self.base_out, self.gate_out, self.gate_out_bias):
            nn.init.zeros_(parameter)
        nn.init.ones_(self.base_out_bias)

    def from_query(self, q: Tensor, n: Tensor, position: Tensor) -> Tensor:
        with autocast_off(q.device):
            hidden = F.gelu(self._linear(q, self.gate_in, self.gate_in_bias))
            gate = self._linear(hidden, self.gate_out, self.gate_out_bias)[..., 0]
            return self._base(torch.log(real(n)).to(q.dtype)) * (1 + torch.tanh(gate))

    def _base(self, log: Tensor) -> Tensor:
        """Return base(ln n) as [..., H, Tq] for ln n [Tq], [..., 1, Tq] or [..., H, Tq]."""
        weight, bias = (local(parameter).to(log.dtype) for parameter in (self.base_out, self.base_out_bias))
        is_shared = log.dim() < 2 or log.shape[-2] == 1
        log = log.reshape(*log.shape[:-2], -1) if is_shared else log
        hidden = F.gelu(self._linear(log[..., None], self.base_in, self.base_in_bias))  # [..., Tq, hidden]
        if is_shared:
            return F.linear(hidden, weight, bias).movedim(-1, -2)
        return (hidden * weight[:, None]).sum(-1) + bias[:, None]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(x, self.shared(weight).to(x.dtype), self.shared(bias).to(x.dtype))


def _layer(outputs: int, inputs: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return the weight and bias of a linear layer, without values."""
    return nn.Parameter(torch.empty(outputs, inputs)), nn.Parameter(torch.empty(outputs))


def _dot(x: Tensor, w: Tensor) -> Tensor:
    """Return w_h·x [B, H, Tq] for x [B, H, Tq, D] and w [H, D].

    As products and sums: autocast would compute a matrix product in half precision.
    """
    return (x * local(w)[:, None]).sum(-1)


def _per_head(x: Tensor, like: Tensor) -> Tensor:
    """Return a parameter [H, ...] as [H, 1, ...], in the dtype of another tensor."""
    return local(x)[:, None].to(like.dtype)
