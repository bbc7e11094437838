"""Instruction counts of each loop of a compiled kernel by kind, and identification of the loops."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from scripts.static.loops import Block, Instruction, Loop, loop_nest


class Counts(NamedTuple):
    """Instructions of one warp in one iteration of a loop, by execution pipe."""

    mma: int = 0  # matrix products
    ex2: int = 0  # powers of two
    special: int = 0  # other functions of the same unit: 1/x, log2, tanh
    fp32: int = 0  # multiply, add, fused
    fp32_pairs: int = 0  # packed fp32
    alu: int = 0  # integer, compare, select, max, convert, move
    shared: int = 0  # shared memory
    memory: int = 0  # global memory, asynchronous copies included
    local: int = 0  # register spills
    shuffle: int = 0  # lane exchange
    other: int = 0  # control flow, barriers, uniform or scalar unit
    total: int = 0
    shared_bytes: int = 0  # per lane, through shared memory
    mma_flops: int = 0  # per warp, if the opcode encodes the shape; else 0


class Structure(NamedTuple):
    """The tile loops in the source of a kernel, in execution order.

    `phases` are those of one sweep over the tiles, repeated `sweeps` times. If `repairs` is set, further loops belong
    to the repair phase. `heads_around`: each loop is nested in a loop over heads. `trips_inside`: iterations of a loop
    inside a tile loop, each of which loads one number.
    """

    phases: tuple[str, ...] = ()  # "before", "hot", "after", see `Phases`
    sweeps: int = 1
    repairs: bool = False
    heads_around: bool = False
    trips_inside: int = 1


class Phases(NamedTuple):
    """Instructions of a warp per tile in each phase, over all sweeps; zeros if a kernel has no such loop."""

    before: Counts = Counts()  # edge tile before the fully visible ones
    hot: Counts = Counts()  # fully visible tile
    after: Counts = Counts()  # edge tile after the fully visible ones
    repair: Counts = Counts()  # tile of the repair phase, which does not normally run
    around: Counts = Counts()  # per head, outside of the tile loops
    once: int = 0  # outside all loops


_SASS_KINDS = {
    "mma": ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "QGMMA", "UTCQMMA"),
    "fp32": ("FFMA", "FMUL", "FADD", "FFMA32I", "HFMA2", "HMUL2", "HADD2"),
    "fp32_pairs": ("FFMA2", "FMUL2", "FADD2"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "memory": ("LDG", "STG", "LDGSTS", "UTMALDG", "UTMASTG", "RED", "ATOMG", "LD", "ST"),
    "local": ("LDL", "STL"),
    "shuffle": ("SHFL",),
    "alu": (
        "IADD3", "IADD", "IMAD", "VIADD", "VIADDMNMX", "VIMNMX", "VIMNMX3", "IMNMX", "LEA", "LOP3", "SHF", "SEL",
        "ISETP", "PLOP3", "PRMT", "MOV", "FMNMX", "FMNMX3", "FSETP", "FSEL", "F2FP", "F2F", "I2F", "I2FP",
        "F2I", "IABS", "SGXT", "CS2R", "FSET", "P2R", "R2P", "BREV", "POPC", "FLO", "FCHK", "IDP",
        "HSETP2", "HMNMX2", "VOTE", "S2R",
    ),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _SASS_KINDS.items() for name in names}
_HMMA_SHAPE = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4}
_GCN_SHARED_BYTES = re.compile(r"^ds_(?:read|write|load|store)(?P<two>2)?(?:st64)?_(?:b|u|i)(?P<bits>\d+)")


def classify(opcode: str) -> str:
    """Return the field of `Counts` for an instruction."""
    return _classify_gcn(opcode) if opcode[0].islower() else _classify_sass(opcode)


def count(instructions: tuple[Instruction, ...]) -> Counts:
    """Count instructions by kind, without `nop`."""
    opcodes = [step.opcode for step in instructions if step.opcode not in ("NOP", "s_nop")]
    kinds = Counter(classify(opcode) for opcode in opcodes)
    return Counts(
        **kinds,
        total=len(opcodes),
        shared_bytes=sum(_shared_bytes(opcode) for opcode in opcodes),
        mma_flops=sum(_mma_flops(opcode) for opcode in opcodes),
    )


def total_of(parts: Iterable[Counts]) -> Counts:
    """Sum the counts of several loops.

    >>> total_of([Counts(mma=8, total=20), Counts(mma=8, total=30)])[:1], total_of([]).total
    ((16,), 0)
    """
    return Counts(*(sum(kind) for kind in zip(Counts(), *parts, strict=True)))


def times(counts: Counts, passes: int) -> Counts:
    """Multiply the counts of a loop by its number of iterations."""
    return Counts(*(passes * number for number in counts))


def find_phases(blocks: list[Block], structure: Structure) -> Phases:
    """Identify the loops of a kernel by their execution order."""
    kernel = loop_nest(blocks)
    around = Counts()
    tiles = list(kernel.inner)
    if structure.heads_around:
        around = total_of(count(loop.own) for loop in tiles)
        tiles = [inner for loop in tiles for inner in loop.inner]
    expected = structure.phases * structure.sweeps
    if len(tiles) < len(expected) or (len(tiles) > len(expected) and not structure.repairs):
        lengths = [count(loop.instructions).total for loop in tiles]
        raise ValueError(f"found tile loops of {lengths} instructions, expected the loops {list(expected)}")
    names = expected + ("repair",) * (len(tiles) - len(expected))
    found = {
        name: total_of(
            _one_tile(loop, structure.trips_inside) for loop, own in zip(tiles, names, strict=True) if own == name
        )
        for name in names
    }
    return Phases(**found, around=around, once=count(kernel.own).total)


def _one_tile(loop: Loop, trips: int) -> Counts:
    """Count one iteration including inner loops; an unrolled inner loop loads several numbers per iteration."""
    parts = [count(loop.own)]
    for inner in loop.inner:
        counts = count(inner.instructions)
        parts.append(times(counts, trips // max(counts.memory, 1)))
    return total_of(parts)


def _classify_sass(opcode: str) -> str:
    name = opcode.split(".")[0]
    if name == "MUFU":
        return "ex2" if opcode.startswith("MUFU.EX2") else "special"
    return _KIND_OF.get(name, "other")


def _classify_gcn(opcode: str) -> str:
    if opcode.startswith(("v_mfma", "v_smfmac")):
        return "mma"
    if opcode.startswith("v_exp_f32"):
        return "ex2"
    if opcode.startswith(("v_rcp", "v_log", "v_rsq", "v_sqrt", "v_sin", "v_cos")):
        return "special"
    if re.match(r"v_pk_(mul|add|fma)_f32", opcode):
        return "fp32_pairs"
    if opcode.endswith("_dpp") or opcode.startswith(("ds_bpermute", "ds_permute", "ds_swizzle", "v_permlane")):
        return "shuffle"
    if re.match(r"v_(mul|add|sub|subrev|fma|fmac|mac|fmamk|fmaak)_f32", opcode):
        return "fp32"
    if opcode.startswith("ds_"):
        return "shared"
    if opcode.startswith("scratch_"):
        return "local"
    if opcode.startswith(("buffer_", "global_", "flat_")):
        return "memory"
    return "alu" if opcode.startswith("v_") else "other"


def _shared_bytes(opcode: str) -> int:
    """Return bytes per lane; a shared memory bank is four bytes wide, so narrower accesses are not faster."""
    if found := _GCN_SHARED_BYTES.match(opcode):
        return max(4, int(found["bits"]) // 8) * (2 if found["two"] else 1)
    parts = opcode.split(".")
    if parts[0] in ("LDSM", "STSM"):
        return 4 * int(parts[-1]) if parts[-1].isdigit() else 4
    if parts[0] in ("LDS", "STS", "LDGSTS"):
        return {"64": 8, "128": 16}.get(parts[-1], 4)
    return 0


def _mma_flops(opcode: str) -> int:
    """Return the FLOPs of one instruction for one warp; a multiply-add counts as two."""
    parts = opcode.split(".")
    if parts[0] == "HMMA" and parts[1] in _HMMA_SHAPE:
        return 2 * _HMMA_SHAPE[parts[1]]
    if found := re.match(r"(?:HGMMA\.|v_mfma_f32_)(\d+)x(\d+)x(\d+)", opcode):
        m, n, k = (int(extent) for extent in found.groups())
        return 2 * m * n * k // (4 if parts[0] == "HGMMA" else 1)  # issued jointly by four warps
    return 0
