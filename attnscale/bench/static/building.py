"""Making rows of the table: every variant compiled for every target, in several processes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from attnscale.bench.static.compiling import Compiled, compile_launch, versions
from attnscale.bench.static.table import Row, Table
from attnscale.bench.static.targets import TARGETS
from attnscale.bench.static.variant import Variant
from attnscale.bench.static.variants import variants
from attnscale_kernels.launch import Launch, block_of

Job = tuple[int, str]  # a variant by its place in the list (functions do not travel), and a target


def jobs(*, all_targets: bool = True) -> list[Job]:
    """What to compile: every variant for all targets, or each for one of them in turn."""
    names = list(TARGETS)
    return [
        (index, target)
        for index in range(len(variants()))
        for target in (names if all_targets else [names[index % len(names)]])
    ]


def build_table(wanted: Iterable[Job], workers: int = 2) -> Table:
    """Compile in worker processes of their own, which have triton as a compiler and not as an interpreter."""
    os.environ.pop("TRITON_INTERPRET", None)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return Table(pool.submit(versions).result(), list(pool.map(build_row, wanted)))


def build_row(job: Job) -> Row:
    """Compile one variant for one target."""
    variant, target = variants()[job[0]], job[1]
    return row_of(variant, target, compile_variant(variant, target))


def compile_variant(variant: Variant, target: str) -> Compiled:
    """What compiling a variant for a target gives."""
    launch = variant.launch(TARGETS[target].resources)
    return compile_launch(launch, TARGETS[target], variant.structure)


def row_of(variant: Variant, target: str, compiled: Compiled) -> Row:
    """The row of a variant and a target: how it is launched there, and what compiling it has given."""
    launch = variant.launch(TARGETS[target].resources)
    return Row(
        variant.family, variant.name, variant.dtype, variant.dim, target, _tile(launch), launch.warps, launch.stages,
        compiled.registers, compiled.spills, compiled.shared_memory, _matrix_flops(variant, launch),
        _tile_bytes(variant, launch), compiled.phases,
    )  # fmt: skip


def _tile(launch: Launch) -> tuple[int, int]:
    extents = [launch.constants.get(name, 1) for name in ("BLOCK_M", "BLOCK_N")]
    return int(str(extents[0])), int(str(extents[1]))


def _matrix_flops(variant: Variant, launch: Launch) -> int:
    """Of the products of one tile; values are as wide as keys in all variants."""
    m, n = _tile(launch)
    return 2 * variant.products * m * n * block_of(variant.dim) if variant.products else 0


def _tile_bytes(variant: Variant, launch: Launch) -> int:
    """Two operands of a step: keys and values, or queries and gradients; gap counting reads keys twice."""
    m, n = _tile(launch)
    size = 4 if variant.dtype == "fp32" else 2
    if not variant.products:
        return 0
    return min(variant.products, 2) * (m if variant.family == "backward dK dV" else n) * variant.dim * size
