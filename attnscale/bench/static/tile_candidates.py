"""Which tiles are compared: for each kernel and head dimension a handful that are plausible on a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attnscale.bench.static.flash_variants import backward_variant, forward_variant
from attnscale.bench.static.targets import TARGETS
from attnscale.bench.static.variant import Variant
from attnscale_kernels.launch import Launch, Tile


class Case(NamedTuple):
    """A kernel on a target, at whichever tile."""

    kernel: str
    dim: int
    target: str

    def variant(self, tile: Tile | None = None) -> Variant:
        """As it is compiled at a tile, or at that of the rules."""
        return _KERNELS[self.kernel](self.dim, tile)

    def rule(self) -> Tile:
        """The tile that the rules give."""
        return tile_of(self.variant().launch(TARGETS[self.target].resources))


def cases() -> list[Case]:
    """All that are compared, in bf16 and causal.

    >>> len(cases())
    84
    """
    return [
        Case(kernel, dim, target)
        for kernel in _KERNELS
        for dim in (32, 64, 128, 256)
        if kernel != "forward" or dim in (64, 128)  # elsewhere its tile is that with entropy
        for target in TARGETS
    ]


def candidates(case: Case) -> list[Tile]:
    """Tiles to compare with that of the rules, which comes first.

    >>> candidates(Case("dQ", 128, "gfx942"))[0]
    Tile(m=128, n=32, warps=4, stages=1, registers=0)
    """
    plausible = _CANDIDATES.get(case.target, _WITHOUT_DESCRIPTORS)[case.kernel.split(",")[0]]
    return list(dict.fromkeys([case.rule(), *(Tile(*tile) for tile in plausible[case.dim])]))


def tile_of(launch: Launch) -> Tile:
    """The tile of a launch."""
    given = {
        name: int(str(launch.constants.get(name, 0))) for name in ("BLOCK_M", "BLOCK_N", "maxnreg", "waves_per_eu")
    }
    registers = 512 // given["waves_per_eu"] if given["waves_per_eu"] else given["maxnreg"]
    return Tile(given["BLOCK_M"], given["BLOCK_N"], launch.warps, launch.stages, registers)


_KERNELS: dict[str, Callable[[int, Tile | None], Variant]] = {
    "forward": lambda dim, tile: forward_variant(dim, torch.bfloat16, "causal", "plain", tile=tile),
    "forward, entropy": lambda dim, tile: forward_variant(dim, torch.bfloat16, "causal", "entropy", tile=tile),
    "dQ": lambda dim, tile: backward_variant(1, dim, torch.bfloat16, "causal", tile=tile),
    "dK dV": lambda dim, tile: backward_variant(2, dim, torch.bfloat16, "causal", tile=tile),
}

# As m, n, warps, stages and, if it is limited, registers. With 4 warps a warp has 32 of 128 rows, and reads each key
# from shared memory half as often as with 16. Two blocks of 8 warps are on an SM at once with at most 128 registers.
_Candidates = dict[str, dict[int, list[tuple[int, ...]]]]
_WITHOUT_DESCRIPTORS: _Candidates = {
    "forward": {
        32: [(128, 128, 8, 2), (128, 64, 8, 2, 128), (128, 64, 4, 2)],
        64: [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2, 128), (128, 64, 4, 2), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (128, 32, 4, 2), (64, 64, 4, 2)],
        256: [(32, 32, 4, 2)],
    },
    "dQ": {
        32: [(128, 64, 8, 2), (128, 64, 8, 2, 128), (128, 32, 4, 2)],
        64: [(128, 64, 8, 2), (128, 32, 8, 2, 128), (128, 32, 4, 2), (64, 64, 4, 2)],
        128: [(128, 32, 8, 2), (64, 32, 4, 2), (64, 64, 8, 2)],
        256: [(32, 32, 4, 1), (32, 32, 4, 2)],
    },
    "dK dV": {
        32: [(32, 128, 8, 2), (64, 128, 8, 2), (32, 64, 4, 2)],
        64: [(32, 128, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2)],
        128: [(16, 128, 8, 3), (16, 128, 8, 2), (32, 64, 8, 2), (32, 64, 4, 2)],
        256: [(32, 32, 4, 1)],
    },
}
_SM_90: _Candidates = {
    "forward": {
        32: [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
        64: [(128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3)],
        256: [(128, 64, 8, 2), (64, 64, 4, 2)],
    },
    "dQ": {
        32: [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2, 128), (128, 32, 4, 2)],
        64: [(128, 128, 8, 2), (128, 64, 8, 2, 128), (128, 32, 4, 2), (64, 64, 4, 2)],
        128: [(128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 4, 2)],
        256: [(128, 32, 8, 2), (64, 32, 8, 1), (32, 32, 4, 1), (32, 32, 4, 2)],
    },
    "dK dV": {
        32: [(64, 128, 8, 2), (64, 128, 8, 3), (32, 64, 4, 2)],
        64: [(64, 128, 8, 3), (64, 64, 4, 2), (32, 128, 8, 2), (32, 64, 4, 2)],
        128: [(32, 128, 8, 3), (16, 128, 8, 2), (32, 64, 4, 2)],
        256: [(32, 64, 8, 1), (32, 32, 4, 1)],
    },
}
_SM_100: _Candidates = {
    "forward": {
        32: [(128, 128, 8, 3), (128, 128, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3)],
        64: [(128, 128, 8, 3), (128, 128, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 128, 4, 2), (128, 64, 8, 3), (128, 64, 4, 2)],
        256: [(128, 64, 8, 2), (64, 64, 4, 2)],
    },
    "dQ": {
        32: [(128, 64, 8, 2, 168), (128, 32, 4, 2)],
        64: [(128, 64, 8, 2, 168), (128, 32, 4, 2), (64, 64, 4, 2)],
        128: [(128, 32, 8, 2), (128, 64, 8, 2), (128, 32, 4, 2)],
        256: [(128, 64, 8, 1), (64, 32, 8, 1), (64, 32, 4, 1)],
    },
    "dK dV": {
        32: [(64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 4, 2), (32, 64, 4, 2)],
        64: [(64, 64, 4, 2), (64, 128, 8, 2), (32, 128, 4, 2), (32, 64, 4, 2)],
        128: [(64, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 2)],
        256: [(32, 64, 8, 1), (64, 64, 8, 1)],
    },
}
_GFX_942: _Candidates = {
    "forward": {
        32: [(128, 64, 4, 1, 168), (128, 32, 4, 1)],
        64: [(128, 64, 4, 1, 256), (128, 32, 4, 1), (64, 64, 4, 1)],
        128: [(128, 64, 4, 1), (128, 64, 4, 1, 256), (128, 32, 4, 1), (64, 64, 4, 1)],
        256: [(64, 32, 4, 1), (64, 64, 4, 1), (128, 32, 4, 1)],
    },
    "dQ": {
        32: [(128, 64, 4, 1), (128, 64, 4, 1, 168), (128, 32, 4, 1)],
        64: [(128, 64, 4, 1), (128, 64, 4, 1, 256), (128, 32, 4, 1), (64, 64, 4, 1)],
        128: [(128, 32, 4, 1), (128, 32, 4, 1, 256), (64, 32, 4, 1), (64, 64, 4, 1)],
        256: [(64, 32, 4, 1), (64, 16, 4, 1)],
    },
    "dK dV": {
        32: [(32, 128, 4, 1), (32, 128, 4, 1, 168), (16, 128, 4, 1)],
        64: [(32, 128, 4, 1), (32, 128, 4, 1, 256), (16, 128, 4, 1), (32, 64, 4, 1)],
        128: [(16, 128, 4, 1), (32, 128, 4, 1), (16, 128, 4, 1, 256), (16, 64, 4, 1)],
        256: [(32, 64, 4, 1), (16, 64, 4, 1)],
    },
}
_CANDIDATES = {"sm_90": _SM_90, "sm_100": _SM_100, "gfx942": _GFX_942}
