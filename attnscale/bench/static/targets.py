"""The devices that kernels are compiled for without having one."""

from __future__ import annotations

from typing import NamedTuple

from attnscale_kernels.launch import GFX_942, SM_80, SM_90, SM_100, Resources


class Target(NamedTuple):
    """A device as triton names it, and what tiles are chosen by on it."""

    backend: str
    arch: int | str
    resources: Resources


TARGETS = {
    "sm_80": Target("cuda", 80, SM_80),
    "sm_90": Target("cuda", 90, SM_90),
    "sm_100": Target("cuda", 100, SM_100),
    "gfx942": Target("hip", "gfx942", GFX_942),
}
