"""Policies with trainable parameters, one set per head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnscale._util.processes import local
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies.base import LONGEST_USUAL_CONTEXT, LengthPolicy, ln, read_lengths
from attnscale.policies.fields import flag, length, not_negative, number


@dataclass(eq=False, repr=False, kw_only=True)
class SSMax(LengthPolicy):
    """Scalable softmax (arXiv:2501.19399): s_h·ln(pos + 1), plus b_h with `bias=True`; s and b are [H] parameters.

    β is [..., H, Tq] for n [..., 1, Tq] or [Tq]. Uses the position, n − 1 if unknown.

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
class ASEntmax(LengthPolicy):
    """ASEntmax scale (arXiv:2506.16640): δ + softplus(w_β·x)·(ln(pos + 2))^(2·tanh(w_γ·x)), per head and token.

    x is the query vector [D] of the head; w_β and w_γ are [H, D] parameters. They start at zero, where β = δ + ln 2 at
    every length. β is [B, H, Tq] for queries [B, H, Tq, D]. Uses the position, n − 1 if unknown.

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
    needs_query = True
    num_heads: int = length(least=1)
    head_dim: int = length(least=1)
    delta: float = not_negative(1.0)

    def validate(self) -> None:
        self.w_beta = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.w_gamma = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the initial values, with β = δ + ln 2 at every length."""
        nn.init.zeros_(self.w_beta)
        nn.init.zeros_(self.w_gamma)

    def forward(self, n: int | Tensor, *, positions: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        """Return β [B, H, Tq] for n (or positions) [..., Tq] and queries [B, H, Tq, D]."""
        if not isinstance(query, Tensor):
            reject_type("query", query, "the queries, a tensor [B, H, Tq, D]")
        w_beta, w_gamma = local(self.w_beta), local(self.w_gamma)
        if query.dim() < 3 or query.shape[-3] != w_beta.shape[0] or query.shape[-1] != self.head_dim:
            raise ArgumentError(
                f"query of shape {list(query.shape)} is not accepted: expected "
                f"[B, {w_beta.shape[0]}, Tq, {self.head_dim}], the heads of this asentmax policy"
            )
        _, position = read_lengths(n, positions)
        if position.dim() and position.shape[-1] not in (1, query.shape[-2]):
            reject("n or positions", list(position.shape), f"a shape that broadcasts with {query.shape[-2]} query rows")
        x = query.to(torch.promote_types(query.dtype, torch.float32))
        # Products and sums, as autocast would compute a matrix product in half precision.
        strength = F.softplus((x * w_beta[:, None]).sum(-1))
        exponent = 2 * torch.tanh((x * w_gamma[:, None]).sum(-1))
        beta = self.delta + strength * ln(position + 2).to(x.dtype).pow(exponent)
        return beta.to(self.dtype)

    def longest_beta(self) -> float:
        # For typical maxima: strength 1, exponent 2.
        return self.delta + math.log(LONGEST_USUAL_CONTEXT) ** 2
