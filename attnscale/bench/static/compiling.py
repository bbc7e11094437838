"""Compiling a launch for a device that is not here, as triton would compile it there.

Not in a process where kernels are interpreted: triton decides between the two when it is imported.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from attnscale.bench.static.listing import parse_gcn, parse_sass
from attnscale.bench.static.phases import Phases, Structure, find_phases
from attnscale.bench.static.targets import Target
from attnscale_kernels.launch import Launch


class Compiled(NamedTuple):
    """What a kernel takes of a device, and its loops."""

    registers: int  # of a thread; on gfx942 vector and accumulation registers together
    spills: int  # bytes of a thread that do not fit into registers
    shared_memory: int  # bytes of a block
    phases: Phases
    tensor_columns: int = 0  # of tensor memory, which sm_100 has


def compile_launch(launch: Launch, target: Target, structure: Structure) -> Compiled:
    """Compile for a target and look at the result."""
    kernel = _compile(launch, target)
    shared = int(kernel.metadata.shared)
    if target.backend == "hip":
        text = str(kernel.asm["amdgcn"])
        blocks, (registers, spills) = parse_gcn(text), gcn_usage(text)
    else:
        listing, usage = _disassemble(kernel.asm["cubin"])
        blocks, (registers, spills) = parse_sass(listing), cubin_usage(usage)
    columns = int(getattr(kernel.metadata, "tmem_size", 0) or 0)
    return Compiled(registers, spills, shared, find_phases(blocks, structure), columns)


def versions() -> dict[str, str]:
    """Of what decides about the result: triton (with its LLVM) and the two assemblers that it brings."""
    import triton

    return {
        "triton": str(triton.__version__),
        "ptxas": _version("ptxas"),
        "ptxas_blackwell": _version("ptxas_blackwell"),
    }


def gcn_usage(text: str) -> tuple[int, int]:
    """Registers and bytes spilled, from the metadata at the end of the listing."""
    spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    return _number(r"\.vgpr_count:\s+(\d+)", text), max(
        spilled, _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    )


def cubin_usage(text: str) -> tuple[int, int]:
    """Registers and bytes spilled, as `cuobjdump -res-usage` says: kernels of triton use the stack for nothing else."""
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _compile(launch: Launch, target: Target) -> Any:
    """With the very functions that triton specialises the arguments of a launch by."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    gpu = GPUTarget(target.backend, target.arch, target.resources.warp_size)
    backend = make_backend(gpu)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {**launch.arguments, **launch.constants}
    arguments, specialisation, settings = bind(**given, num_warps=launch.warps, num_stages=launch.stages)
    options, signature, constants, attributes = kernel._pack_args(
        backend, settings, arguments, specialisation, settings
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=options.__dict__)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """The listing of a cubin and its use of registers.

    Without the analysis of data flow, which finds where indirect jumps lead: there are none.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _output(knobs.nvidia.nvdisasm.path, "-c", "-ndf", path)
        return listing, _output(knobs.nvidia.cuobjdump.path, "-res-usage", path)


@functools.cache
def _version(tool: str) -> str:
    from triton import knobs

    found = re.search(r"V(\d+\.\d+\.\d+)", _output(getattr(knobs.nvidia, tool).path, "--version"))
    return found[1] if found else "unknown"


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"nothing like {pattern!r} in what the assembler reports")
    return int(found[1])
