"""What every launch needs: the current device, its resources, and arguments in the form kernels take them."""

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
    """What tiles and splits are chosen by."""

    shared_memory: int  # bytes of a block
    warp_size: int
    multiprocessors: int = 108  # those of an A100
    capability: int = 80  # of CUDA, as 10·major + minor; 0 elsewhere

    @property
    def copies_boxes(self) -> bool:
        """Whether tiles come by descriptors, straight to where matrix units read them: on sm_90 and sm_100."""
        return 90 <= self.capability < 120

    @property
    def has_tensor_memory(self) -> bool:
        """Whether matrix products stay outside of registers: on sm_100, and not on sm_120."""
        return 100 <= self.capability < 120


LARGEST_TILE = 128  # rows or keys

# Limits of the devices that kernels are compiled for ahead of time.
SM_80 = Resources(166_912, 32)
SM_90 = Resources(232_448, 32, capability=90)
SM_100 = Resources(232_448, 32, capability=100)
GFX_942 = Resources(65_536, 64, capability=0)


_assumed: ContextVar[Resources | None] = ContextVar("assumed", default=None)


@contextlib.contextmanager
def assuming(resources: Resources) -> Iterator[None]:
    """Choose tiles as for a device with these resources, to compile for one that is not here."""
    token = _assumed.set(resources)
    try:
        yield
    finally:
        _assumed.reset(token)


# What `resources_of` depends on beside the device.
assumed_resources = _assumed.get


def resources_of(device: torch.device) -> Resources:
    """What the device of a tensor has; an A100 stands for the CPU of the interpreter."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type == "cuda":
        return _query(device.index or 0)
    reason = why_unavailable(device)
    if reason is not None:
        none = "" if torch.cuda.is_available() else ", and torch sees none"
        hint = "TRITON_INTERPRET=1, set before triton and this package are imported, runs them on the CPU, slowly"
        raise KernelUnavailableError(f"{reason}{none}; {hint}")
    return SM_80


# Cached per process: the resources of a device are constants of the machine.
@functools.cache
def _query(index: int) -> Resources:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return Resources(int(shared), int(properties.warp_size), int(properties.multi_processor_count), capability)


class Tile(NamedTuple):
    """Query rows and keys of a tile, warps of a program, and how many tiles of keys are in flight.

    `registers` is the most that a thread may have, 0 where the assembler decides. That of CUDA aims at a number of
    blocks of a multiprocessor, and spills a few bytes to reach it; told a number, it spills only what is beyond.
    """

    m: int
    n: int
    warps: int
    stages: int
    registers: int = 0


class Launch(NamedTuple):
    """A kernel and everything it is launched with. The same object is run, or compiled ahead of time."""

    kernel: Any
    grid: int
    arguments: dict[str, object]
    constants: dict[str, object]
    warps: int
    stages: int
    compiled: list[Any] | None = None  # of a `PlannedKernel`

    def run(self, like: Tensor) -> None:
        """Launch on the device of a tensor, if there is anything to do."""
        run(((self,), None), like)


class PlannedKernel(NamedTuple):
    """What launches of a kernel have in common by one plan."""

    kernel: Any
    constants: dict[str, object]
    warps: int
    stages: int
    compiled: list[Any]  # empty until the first launch; see launch_cache.py

    def launch(self, grid: int, arguments: dict[str, object]) -> Launch:
        """Of a number of programs, with the arguments of one call."""
        kernel, constants, warps, stages, compiled = self
        return Launch(kernel, grid, arguments, constants, warps, stages, compiled)


def run(made: tuple[tuple[Launch, ...], Found], like: Tensor) -> Found:
    """Run launches in order on the device of a tensor, and return what they were made with: what they fill."""
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
    """A function that makes launches, as one that also runs them.

    To pass arguments on takes half a microsecond, so that calls which are to be quick `run` what they make themselves.
    """

    @functools.wraps(make)
    def make_and_run(like: Tensor, /, *args: Others.args, **kwargs: Others.kwargs) -> Found:
        return run(make(like, *args, **kwargs), like)

    return make_and_run


class View(NamedTuple):
    """A tensor as kernels take it."""

    ptr: Tensor
    strides: tuple[int, ...]


# `View` of a tensor and strides, given as a tuple, without the function in Python that makes a NamedTuple.
new_view: Callable[[tuple[Tensor, tuple[int, ...]]], View] = functools.partial(tuple.__new__, View)


def view(x: Tensor) -> View:
    """A tensor with its strides, of which that of a contiguous last axis is compiled in."""
    return View(x, x.stride())


def fp32_beta(beta: Tensor) -> Tensor:
    """β in fp32; `to` would take longer to find that there is nothing to do."""
    if beta.dtype is torch.float32:
        return beta
    check_beta_dtype(beta)
    return beta.to(torch.float32)


def row_view(beta: Tensor) -> View:
    """β of any shape that broadcasts to [B, H, T], in fp32 as [B, H, T]."""
    beta = fp32_beta(beta)
    return View(beta, row_strides(beta))


def row_strides(beta: Tensor) -> tuple[int, ...]:
    """The strides of a `row_view`, 0 along broadcast axes.

    >>> row_strides(torch.ones(5)), row_strides(torch.ones(2, 1, 5))
    ((0, 0, 1), (5, 0, 1))
    """
    strides = [0 if n == 1 else s for n, s in zip(beta.shape, beta.stride(), strict=True)]
    return (0,) * (3 - len(strides)) + tuple(strides)


def attention_arguments(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> dict[str, object]:
    """What every kernel that computes scores is given."""
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
    """What every kernel that computes scores is compiled for."""
    return _register_options(tile, resources_of(query.device)) | {
        "D": query.shape[-1],
        "BLOCK_D": block_of(query.shape[-1]),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        # In half precision there is only one way.
        "PRECISION": "tf32" if query.dtype == torch.float32 and multiplies_in_tf32() else "ieee",
    }


def _register_options(tile: Tile, resources: Resources) -> dict[str, object]:
    """The most registers of a thread as an option of triton's compiler, which it takes among the constants."""
    if not tile.registers:
        return {}
    # AMD's is told how many warps of a vector unit share its 512.
    return {"waves_per_eu": 512 // tile.registers} if resources.warp_size == 64 else {"maxnreg": tile.registers}


def multiplies_in_tf32() -> bool:
    """Whether torch is set to multiply matrices of fp32 in TF32, in whichever of its ways.

    `allow_tf32` must not be read: it raises where `torch.backends.fp32_precision` was set.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def positive_scale(beta: Tensor, scale: float) -> tuple[Tensor, float]:
    """β and scale with the same product and a positive scale, which the online softmax needs in linear logits."""
    if scale > 0.0:
        return beta, scale
    return (-beta, -scale) if scale < 0.0 else (torch.zeros_like(beta), 1.0)


def empty_like_layout(x: Tensor, width: int) -> Tensor:
    """Memory [B, H, T, width] whose axes are in the order that those of x [B, H, T, D] have in memory.

    Models that project to [B, T, H·D] give a query whose heads lie inside its rows, and copy a result that does not.
    """
    batch, heads, rows, _ = x.shape
    strides = x.stride()
    if strides[1] < strides[2]:
        return x.new_empty(batch, rows, heads, width).transpose(1, 2)
    return x.new_empty(batch, heads, rows, width)


class Forward(NamedTuple):
    """The output of attention, and statistics per row in fp32 and nats."""

    out: Tensor  # [B, H, Tq, DV]
    lse: Tensor  # [B, H, Tq]
    max_logit: Tensor  # [B, H, Tq]
    entropy: Tensor | None  # [B, H, Tq]; None: not asked for
    winner: Tensor | None = None  # [B, H, Tq] int64: the slot of the largest logit, −1 where there is none; or None

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What an operator returns, none of which can be None: what was not asked for is empty."""
        entropy = self.lse.new_empty(0) if self.entropy is None else self.entropy
        winner = self.lse.new_empty(0, dtype=torch.int64) if self.winner is None else self.winner
        return self.out, self.lse, self.max_logit, entropy, winner


def new_forward(query: Tensor, width: int, entropy: bool, winner: bool) -> Forward:
    """Memory for the result of a forward with values as wide; the output in the layout of the query."""
    batch, heads, queries, _ = query.shape
    rows = query.new_empty(batch, heads, queries, dtype=torch.float32)
    top = torch.empty_like(rows)
    disorder = torch.empty_like(rows) if entropy else None
    slots = torch.empty_like(rows, dtype=torch.int64) if winner else None
    return Forward(empty_like_layout(query, width), rows, top, disorder, slots)


def on_device(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers as fp32 [k] on a tensor's device, by filling: a copy from the host would synchronise."""
    if not numbers:
        return like.new_empty(0, dtype=torch.float32)
    return torch.stack([like.new_full((), float(number), dtype=torch.float32) for number in numbers])


def unit_stride(x: Tensor) -> Tensor:
    """The tensor with its last axis contiguous, copied only where it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def cdiv(count: int, size: int) -> int:
    """How many parts of a size cover a count; that of triton takes as long as an allocation."""
    return -(-count // size)


def near_rows(x: Tensor) -> Tensor:
    """[B, H, T, D] as `unit_stride`, and copied too where the rows of a tile do not lie within 2³¹ elements."""
    return unit_stride(x if x.stride(2) * LARGEST_TILE < 2**31 else x.contiguous())


def alignment(*tensors: Tensor) -> int:
    """Elements of 16 bytes, where all rows of the tensors begin at a multiple of them and triton does not see it.

    Elsewhere 1. It sees multiples of 16 elements by itself; strides of 24 or 40 dimensions are multiples of 8.
    """
    strides = [stride for x in tensors for stride in x.stride()[:-1]]
    elements = 16 // tensors[0].element_size()
    told = all(stride % 16 == 0 for stride in strides) or any(stride % elements for stride in strides)
    return 1 if told else elements


@functools.cache
def block_of(extent: int) -> int:
    """The power of two that a head dimension is padded to: at least 16, which is what a matrix product takes."""
    return max(16, 1 << (extent - 1).bit_length())
