"""Shared host code of all launches: device resources, `Launch` objects and kernel arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import launch_cache
from .arguments import check_beta_dtype
from .availability import why_unavailable
from .errors import KernelUnavailableError

Others = ParamSpec("Others")
Found = TypeVar("Found")


class Resources(NamedTuple):
    """Device properties that determine tiles and splits."""

    shared_memory: int  # bytes per thread block
    warp_size: int
    multiprocessors: int = 108  # default: A100
    capability: int = 80  # CUDA compute capability as 10·major + minor; 0 on other platforms

    @property
    def copies_boxes(self) -> bool:
        """Whether tiles are loaded through TMA descriptors: on sm_90 and sm_100."""
        return 90 <= self.capability < 120

    @property
    def has_tensor_memory(self) -> bool:
        """Whether accumulators live in tensor memory instead of registers: on sm_100, not on sm_120."""
        return 100 <= self.capability < 120


LARGEST_TILE = 128  # rows or keys

# Limits of the targets compiled ahead of time.
SM_80 = Resources(166_912, 32)
SM_90 = Resources(232_448, 32, capability=90)
SM_100 = Resources(232_448, 32, capability=100)
GFX_942 = Resources(65_536, 64, capability=0)


_assumed: ContextVar[Resources | None] = ContextVar("assumed", default=None)


@contextlib.contextmanager
def assuming(resources: Resources) -> Iterator[None]:
    """Choose tiles for a device with these resources, to compile for a device that is not present."""
    token = _assumed.set(resources)
    try:
        yield
    finally:
        _assumed.reset(token)


# Second input of `resources_of` besides the device; part of every launch signature.
assumed_resources = _assumed.get


def resources_of(device: torch.device) -> Resources:
    """Return the resources of a device. In the interpreter, the CPU is treated like an A100."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type == "cuda":
        return _query(device.index or 0)
    reason = why_unavailable(device)
    if reason is not None:
        none = "" if torch.cuda.is_available() else ", and torch finds none"
        hint = "to run them on the CPU, slowly, set TRITON_INTERPRET=1 before importing triton and this package"
        raise KernelUnavailableError(f"{reason}{none}; {hint}")
    return SM_80


# Cached per process: device resources are constant.
@functools.cache
def _query(index: int) -> Resources:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return Resources(int(shared), int(properties.warp_size), int(properties.multi_processor_count), capability)


class Tile(NamedTuple):
    """Tile size in query rows and keys, warps per program, and pipeline stages.

    `registers` is the maximum number of registers per thread, or 0 to leave the choice to the assembler. ptxas aims at
    a certain occupancy and spills a few bytes to reach it. With an explicit limit it spills only the excess.
    """

    m: int
    n: int
    warps: int
    stages: int
    registers: int = 0


class Launch(NamedTuple):
    """A kernel with all its launch parameters. The same object can be run or compiled ahead of time."""

    kernel: Any
    grid: int
    arguments: dict[str, object]
    constants: dict[str, object]
    warps: int
    stages: int
    compiled: list[Any] | None = None  # set by `PlannedKernel`

    def run(self, like: Tensor) -> None:
        """Launch on the device of a tensor; an empty grid launches nothing."""
        run(((self,), None), like)


class PlannedKernel(NamedTuple):
    """The parameters that all launches of a kernel under one plan share."""

    kernel: Any
    constants: dict[str, object]
    warps: int
    stages: int
    compiled: list[Any]  # empty until the first launch; see launch_cache.py

    def launch(self, grid: int, arguments: dict[str, object]) -> Launch:
        """Return the launch of `grid` programs with the arguments of one call."""
        kernel, constants, warps, stages, compiled = self
        return Launch(kernel, grid, arguments, constants, warps, stages, compiled)


def run(made: tuple[tuple[Launch, ...], Found], like: Tensor) -> Found:
    """Run launches in order on the device of a tensor, and return the result object that they fill."""
    launches, found = made
    device = like.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(made, like)
    for launch in launches:
        if launch.grid:
            launch_cache.launch(device, *launch)
    return found


def launched(
    make: Callable[Concatenate[Tensor, Others], tuple[tuple[Launch, ...], Found]],
) -> Callable[Concatenate[Tensor, Others], Found]:
    """Turn a function that builds launches into one that also runs them.

    Forwarding the arguments takes half a microsecond, so latency-critical callers use `run` directly.
    """

    @functools.wraps(make)
    def make_and_run(like: Tensor, /, *args: Others.args, **kwargs: Others.kwargs) -> Found:
        return run(make(like, *args, **kwargs), like)

    return make_and_run


class View(NamedTuple):
    """A tensor and its strides, as passed to kernels."""

    ptr: Tensor
    strides: tuple[int, ...]


# Makes a `View` from a (tensor, strides) tuple without the Python-level constructor of NamedTuple.
new_view: Callable[[tuple[Tensor, tuple[int, ...]]], View] = functools.partial(tuple.__new__, View)


def view(x: Tensor) -> View:
    """Return a tensor with its strides. Triton compiles in the stride 1 of a contiguous last axis."""
    return View(x, x.stride())


def fp32_beta(beta: Tensor) -> Tensor:
    """Return β in fp32. The early return is faster than a no-op `Tensor.to`."""
    if beta.dtype is torch.float32:
        return beta
    check_beta_dtype(beta)
    return beta.to(torch.float32)


def row_view(beta: Tensor) -> View:
    """Return a `View` [B, H, T] of β in fp32; β may have any shape that broadcasts."""
    beta = fp32_beta(beta)
    return View(beta, row_strides(beta))


def row_strides(beta: Tensor) -> tuple[int, ...]:
    """Return the strides of a `row_view`, 0 along broadcast axes.

    >>> row_strides(torch.ones(5)), row_strides(torch.ones(2, 1, 5))
    ((0, 0, 1), (5, 0, 1))
    """
    strides = [0 if n == 1 else s for n, s in zip(beta.shape, beta.stride(), strict=True)]
    return (0,) * (3 - len(strides)) + tuple(strides)


def attention_arguments(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> dict[str, object]:
    """Return the arguments common to all kernels that compute scores."""
    heads, kv_heads = query.shape[1], key.shape[1]
    return {
        "q": view(query),
        "k": view(key),
        "heads": heads,
        "group": heads // kv_heads,
        "queries": query.shape[2],
        "keys": key.shape[2],
        "scale": scale,
        "softcap": softcap,
    }


def attention_constants(query: Tensor, tile: Tile) -> dict[str, object]:
    """Return the constexprs common to all kernels that compute scores."""
    return _register_options(tile, resources_of(query.device)) | {
        "D": query.shape[-1],
        "BLOCK_D": block_of(query.shape[-1]),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        # Ignored in half precision.
        "PRECISION": "tf32" if query.dtype == torch.float32 and multiplies_in_tf32() else "ieee",
    }


def _register_options(tile: Tile, resources: Resources) -> dict[str, object]:
    """Return the register limit as a compiler option; Triton takes it among the constants."""
    if not tile.registers:
        return {}
    # The AMD option is the number of waves that share the 512 registers of a SIMD unit.
    return {"waves_per_eu": 512 // tile.registers} if resources.warp_size == 64 else {"maxnreg": tile.registers}


def multiplies_in_tf32() -> bool:
    """Whether torch is configured to use TF32 for fp32 matrix products, through any of its settings.

    Reading `allow_tf32` raises after `torch.backends.fp32_precision` has been set.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def positive_scale(beta: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return β and scale with the same product and a positive scale.

    The online softmax of linear logits takes the maximum before it applies β·scale.
    """
    if scale > 0.0:
        return beta, scale
    return (-beta, -scale) if scale < 0.0 else (torch.zeros_like(beta), 1.0)


def empty_like_layout(x: Tensor, width: int) -> Tensor:
    """Allocate [B, H, T, width] with the axis order in memory of x [B, H, T, D].

    Models that project to [B, T, H·D] produce a query with heads inside rows. A result in another layout would be
    copied.
    """
    batch, heads, rows, _ = x.shape
    strides = x.stride()
    if strides[1] < strides[2]:
        return x.new_empty(batch, rows, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, rows, width)


class Forward(NamedTuple):
    """The attention output, and statistics per row in fp32 and nats.

    Attributes:
        out: The output [B, H, Tq, DV].
        lse: Log-sum-exp of the logits [B, H, Tq], sinks included; −∞ for rows without a visible key.
        max_logit: The largest logit of a visible key [B, H, Tq].
        entropy: The entropy of the weights [B, H, Tq], or None if not requested.
        winner: The slot of the largest logit [B, H, Tq] in int64, −1 for rows without one, or None if not requested.
    """

    out: Tensor  # [B, H, Tq, DV]
    lse: Tensor  # [B, H, Tq]
    max_logit: Tensor  # [B, H, Tq]
    entropy: Tensor | None  # [B, H, Tq]; None: not requested
    winner: Tensor | None = None  # [B, H, Tq] int64; None: not requested

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the operator outputs: an empty tensor in place of None."""
        entropy = self.lse.new_empty(0) if self.entropy is None else self.entropy
        winner = self.lse.new_empty(0, dtype=torch.int64) if self.winner is None else self.winner
        return self.out, self.lse, self.max_logit, entropy, winner


def new_forward(query: Tensor, width: int, entropy: bool, winner: bool) -> Forward:
    """Allocate the result of a forward pass; the output has the memory layout of the query."""
    batch, heads, queries, _ = query.shape
    rows = query.new_empty(batch, heads, queries, dtype=torch.float32)
    top = torch.empty_like(rows)
    disorder = torch.empty_like(rows) if entropy else None
    slots = torch.empty_like(rows, dtype=torch.int64) if winner else None
    return Forward(empty_like_layout(query, width), rows, top, disorder, slots)


def on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers as fp32 [k] on the device of a tensor. Filling avoids a synchronising host-to-device copy."""
    if not numbers:
        return like.new_empty(0, dtype=torch.float32)
    return torch.stack([like.new_full((), float(number), dtype=torch.float32) for number in numbers])


def unit_stride(x: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis, copied only if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def cdiv(count: int, size: int) -> int:
    """Ceiling division. triton.cdiv takes as long as an allocation."""
    return -(-count // size)


def near_rows(x: Tensor) -> Tensor:
    """`unit_stride` of [B, H, T, D], copied too if the rows of a tile span 2³¹ elements or more."""
    return unit_stride(x if x.stride(2) * LARGEST_TILE < 2**31 else x.contiguous())


def alignment(*tensors: Tensor) -> int:
    """Return the number of elements in 16 bytes if all rows are aligned to it and Triton does not detect it, else 1.

    Triton detects multiples of 16 elements by itself. Head dimensions such as 24 or 40 give strides that are multiples
    of 8.
    """
    strides = [stride for x in tensors for stride in x.stride()[:-1]]
    elements = 16 // tensors[0].element_size()
    told = all(stride % 16 == 0 for stride in strides) or any(stride % elements for stride in strides)
    return 1 if told else elements


@functools.cache
def block_of(extent: int) -> int:
    """Pad a head dimension to a power of two, at least 16, the minimum of a matrix product."""
    return max(16, 1 << (extent - 1).bit_length())
