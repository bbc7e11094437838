"""Compilation of every variant for every target, as Triton would compile it there, in several processes.

Triton chooses between compiler and interpreter when it is imported, so workers are separate processes.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from attnscale_kernels.launch import Launch, block_of
from scripts.static.counts import Phases, Structure, find_phases
from scripts.static.loops import parse_gcn, parse_sass
from scripts.static.table import KernelRow, Table
from scripts.static.targets import TARGETS, Target
from scripts.static.variants import Variant, variants

Job = tuple[int, str]  # index of a variant (functions cannot be pickled), and a target


class Compiled(NamedTuple):
    """Resources and loops of a compiled kernel."""

    registers: int  # per thread; on gfx942 vector plus accumulation registers
    spills: int  # bytes per thread
    shared_memory: int  # bytes per block
    phases: Phases
    tensor_columns: int = 0  # tensor memory of sm_100


def compile_launch(launch: Launch, target: Target, structure: Structure) -> Compiled:
    """Compile for a target and analyse the result."""
    kernel = compile_kernel(launch, target)
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
    """Return the versions that determine the result: triton (with its LLVM) and its two assemblers."""
    import triton

    return {
        "triton": str(triton.__version__),
        "ptxas": _version("ptxas"),
        "ptxas_blackwell": _version("ptxas_blackwell"),
    }


def gcn_usage(text: str) -> tuple[int, int]:
    """Return registers and spilled bytes from the metadata at the end of the listing."""
    spilled = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
    return _number(r"\.vgpr_count:\s+(\d+)", text), max(
        spilled, _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
    )


def cubin_usage(text: str) -> tuple[int, int]:
    """Return registers and spilled bytes from `cuobjdump -res-usage`. Triton kernels use the stack for spills only."""
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def compile_kernel(launch: Launch, target: Target) -> Any:
    """Compile with the functions that Triton itself uses to specialise the arguments of a launch."""
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
    """Return the listing of a cubin and its resource usage.

    Data-flow analysis, which resolves indirect jumps, is disabled: there are none.
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
        raise ValueError(f"pattern {pattern!r} not found in the assembler output")
    return int(found[1])


def jobs(*, all_targets: bool = True) -> list[Job]:
    """Return the jobs: every variant for all targets, or each variant for one target in turn."""
    names = list(TARGETS)
    return [
        (index, target)
        for index in range(len(variants()))
        for target in (names if all_targets else [names[index % len(names)]])
    ]


def build_table(wanted: Iterable[Job], workers: int = 2) -> Table:
    """Compile in worker processes that use Triton's compiler instead of its interpreter."""
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return Table(pool.submit(versions).result(), list(pool.map(build_row, wanted)))


def build_row(job: Job) -> KernelRow:
    """Compile one variant for one target."""
    variant, target = variants()[job[0]], job[1]
    return row_of(variant, target, compile_variant(variant, target))


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Return the compilation result of a variant for a target."""
    launch = variant.launch(TARGETS[target].resources)
    return compile_launch(launch, TARGETS[target], variant.structure)


def row_of(variant: Variant, target: str, compiled: Compiled) -> KernelRow:
    """Return the table row of a variant and a target: launch parameters and compilation result."""
    launch = variant.launch(TARGETS[target].resources)
    return KernelRow(
        variant.family, variant.name, variant.dtype, variant.dim, target, _tile(launch), launch.warps, launch.stages,
        compiled.registers, compiled.spills, compiled.shared_memory, compiled.tensor_columns,
        _matrix_flops(variant, launch), _tile_bytes(variant, launch), compiled.phases,
    )  # fmt: skip


def _tile(launch: Launch) -> tuple[int, int]:
    extents = [launch.constants.get(name, 1) for name in ("BLOCK_M", "BLOCK_N")]
    return int(str(extents[0])), int(str(extents[1]))


def _matrix_flops(variant: Variant, launch: Launch) -> int:
    """Return the FLOPs of one tile; values are as wide as keys in all variants."""
    m, n = _tile(launch)
    return 2 * variant.products * m * n * block_of(variant.dim) if variant.products else 0


def _tile_bytes(variant: Variant, launch: Launch) -> int:
    """Return the bytes of both operands of a step: keys and values, queries and gradients, or keys twice (gaps)."""
    m, n = _tile(launch)
    size = 4 if variant.dtype == "fp32" else 2
    if not variant.products:
        return 0
    return min(variant.products, 2) * (m if variant.family == "backward dK dV" else n) * variant.dim * size
