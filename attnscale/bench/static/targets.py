"""The devices that kernels are compiled for without having one."""

from __future__ import annotations

from typing import NamedTuple

from attnscale_kernels.launch import GFX_942, SM_80, SM_90, SM_100, Resources


class Target(NamedTuple):
    """A device as triton names it, and what tiles are chosen by on it."""

    backend: str
    arch: int | str
    resources: Resources


# Cards for desktops and for inference have 99 KB of shared memory for a block.
SM_89 = SM_80._replace(shared_memory=101_376, capability=89)
SM_120 = SM_89._replace(capability=120)

TARGETS = {
    "sm_80": Target("cuda", 80, SM_80),
    "sm_89": Target("cuda", 89, SM_89),
    "sm_90": Target("cuda", 90, SM_90),
    "sm_100": Target("cuda", 100, SM_100),
    "sm_120": Target("cuda", 120, SM_120),
    "gfx942": Target("hip", "gfx942", GFX_942),
}
