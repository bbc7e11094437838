"""Findings for which the compiler is at fault. Each must still be reported, at its instruction and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from compiled.memory import Finding


class Known(NamedTuple):
    """The findings of a case on a target."""

    kernel: str
    kind: str
    instruction: str  # pattern of its text
    count: int  # in both runs


KNOWN = {
    # Triton 3.7.1 puts a layout conversion of β and the first tile of keys at the same address, without a proxy fence
    # between them. `TritonGPUProxyFenceInsertion` does not see it: it computes an allocation of its own, with default
    # sizes for the scratch memory of conversions (98,360 bytes instead of 81,976 of `AllocateSharedMemoryNv`).
    ("sm_90", "forward bf16 D64 bias"): Known("flash_forward_kernel", "PROXY", r"cp\.async\.bulk\.tensor", 8),
}


def are_known(target: str, case: str, problems: Sequence[tuple[str, Finding, str]], found: int) -> bool | None:
    """Whether these are the known findings of a case; None if it has none."""
    known = KNOWN.get((target, case))
    if known is None:
        return None
    return found == known.count == len(problems) and all(
        kernel == known.kernel and finding.kind == known.kind and re.search(known.instruction, text) is not None
        for kernel, finding, text in problems
    )
