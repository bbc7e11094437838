"""Compile the launches of cases for a target: `python -m compiled.compiling sm_80 kernels.json CASE...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from attnscale_kernels.launch import Launch
from compiled.cases import CASES
from compiled.launching import parameters_of
from scripts.static.compiling import compile_kernel
from scripts.static.targets import TARGETS, Target


def main(target: str, file: str, *names: str) -> None:
    """Write the kernels of each case, launch by launch."""
    _without_assembler()
    found = {
        name: [_fields(launch, TARGETS[target]) for launch in CASES[name].call(TARGETS[target].resources).launches]
        for name in names
    }
    Path(file).write_text(json.dumps(found))


def _fields(launch: Launch, target: Target) -> dict[str, Any]:
    kernel = compile_kernel(launch, target)
    source = kernel.src
    return {
        "name": launch.kernel.fn.__name__,
        "target": str(target.arch if target.backend == "hip" else f"sm_{target.arch}"),
        "text": kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"],
        "shared": kernel.metadata.shared,
        "warps": launch.warps,
        "parameters": list(parameters_of(source.signature, source.attrs)),
        "boxes": [_box(x) for x in getattr(kernel.metadata, "tensordesc_meta", None) or ()],
    }


def _box(given: dict[str, Any]) -> tuple[list[int], int, int]:
    """The fields of `Box`."""
    if given["fp4_padded"]:
        raise ValueError("a descriptor of 4-bit numbers")
    return given["block_size"], given["elem_size"], given["swizzle"]


def _without_assembler() -> None:
    """Leave out the last stage, which translates the text into a binary: half of the time for CUDA."""
    from triton import knobs

    def leave_out(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str] | None:
        if stages is None:  # asks for the key of the compilation cache
            return "text", "text"
        for name in ("cubin", "hsaco"):
            if name in stages:
                stages[name] = lambda source, metadata: b""
        return None

    knobs.runtime.add_stages_inspection_hook = leave_out


if __name__ == "__main__":
    main(*sys.argv[1:])
