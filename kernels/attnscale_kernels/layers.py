"""The layer that HuggingFace's `kernels` package finds in a kernel: stateless, without a constructor."""

from __future__ import annotations

from torch import Tensor, nn

from .arguments import check_query
from .visibility import Visibility


class ScaledAttention(nn.Module):
    """softmax(β·scale·q·k)·v with one β per query row.

    >>> layer = ScaledAttention()
    >>> layer.has_backward, layer.can_torch_compile
    (True, True)
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """The output [B, H, Tq, DV] for query [B, H, Tq, D] and key and value [B, Hkv, Tk, D|DV].

        β broadcasts to [B, H, Tq]. Causality counts from the first key, as in torch; `scale` is 1/√D where it is not
        given.
        """
        from .flash.op import flash_attention  # triton comes with it

        visibility = Visibility(right=0 if is_causal else None)
        if scale is None:
            check_query(query)
            scale = max(query.shape[-1], 1) ** -0.5
        return flash_attention(query, key, value, beta, visibility, scale=scale).out
