"""Stateless layers for HuggingFace's `kernels` package."""

from __future__ import annotations

from torch import Tensor, nn

from .arguments import check_query
from .visibility import Visibility


class ScaledAttention(nn.Module):
    """softmax(β·scale·q·kᵀ)·v with one β per query row.

    Loadable through `kernelize` of HuggingFace's `kernels` package: the layer has no constructor and no parameters.

    Example:
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
        """Compute attention.

        Args:
            query: [B, H, Tq, D] in fp32, fp16 or bf16.
            key: [B, Hkv, Tk, D]; Hkv divides H.
            value: [B, Hkv, Tk, DV].
            beta: Any shape that broadcasts to [B, H, Tq].
            is_causal: Mask out keys after the query. Positions are aligned at the first key, as in torch.
            scale: Factor of q·k, 1/√D by default.

        Returns:
            The output [B, H, Tq, DV] in the dtype of the query.

        Raises:
            KernelArgumentError: An argument has an unsupported shape, device or value.
            KernelTypeError: An argument has an unsupported type or dtype.
            KernelUnavailableError: Triton does not support the device.
        """
        from .flash.op import flash_attention  # imports triton

        visibility = Visibility(right=0 if is_causal else None)
        if scale is None:
            check_query(query)
            scale = max(query.shape[-1], 1) ** -0.5
        return flash_attention(query, key, value, beta, visibility, scale=scale).out
