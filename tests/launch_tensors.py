"""Tensors of a launch: its outputs, and all its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnscale_kernels.launch import Launch, View

# Outputs of each kernel, by argument name.
STATISTICS = ("lse_ptr", "top_ptr", "entropy_ptr", "winner_ptr")
OUTPUTS = {
    "mask_squares_kernel": ("squares_ptr",),
    "mask_tiles_kernel": ("lists_ptr",),
    "flash_forward_kernel": ("out", *STATISTICS),
    "flash_backward_rows_kernel": ("rows_ptr",),
    "flash_backward_query_kernel": ("grad_q", "dbeta_ptr"),
    "flash_backward_key_kernel": ("grad_k", "grad_v"),
    "decode_split_kernel": ("scratch_ptr",),
    "decode_merge_kernel": ("out", *STATISTICS),
    "gap_bracket_kernel": ("top_ptr", "gap_ptr", "lower_ptr", "upper_ptr"),
    "gap_count_kernel": ("counts_ptr",),
    "softmax_forward_kernel": ("weights", "lse_ptr", "top_ptr", "w_max_ptr", "entropy_ptr", "counts_ptr"),
    "softmax_backward_kernel": ("grad_scores", "dbeta_ptr"),
}

# Outputs of the kernels that only the tests of compiled code run (compiled/stock.py).
STOCK_OUTPUTS = {
    "vector_add_kernel": ("sum_ptr",),
    "plain_softmax_kernel": ("weights_ptr",),
    "matrix_product_kernel": ("c_ptr",),
}


def name_of(launch: Launch) -> str:
    """The name of the kernel."""
    return str(launch.kernel.fn.__name__)


def outputs_of(launch: Launch) -> list[Tensor]:
    """The tensors that a launch writes."""
    names = (OUTPUTS | STOCK_OUTPUTS)[name_of(launch)]
    if name_of(launch) == "decode_split_kernel" and launch.arguments["splits"] == 1:
        names = OUTPUTS["decode_merge_kernel"]
    given = [launch.arguments[name] for name in names]
    return list(tensors_of(x.ptr if isinstance(x, View) else x for x in given))


def tensors_of(values: Iterable[object]) -> Iterator[Tensor]:
    """All tensors among arguments, including those in tuples and behind descriptors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, TensorDescriptor):
            yield value.base
        elif isinstance(value, tuple):
            yield from tensors_of(value)
