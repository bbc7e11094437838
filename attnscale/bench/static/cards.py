"""Peak rates of cards, as their makers publish them: what the counts of a loop are held against.

A multiprocessor (SM) or compute unit (CU) has four partitions; a warp or wavefront lives in one of them. Rates are
for one partition, in cycles that one instruction of a warp keeps a pipe busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Limits(NamedTuple):
    """What the blocks that are on a unit at once share."""

    warps: int  # of a partition, at most
    blocks: int  # at most
    shared_memory: int  # bytes
    reserved: int  # bytes of it that each block takes for the system
    registers: int = 512  # of a lane in a partition; 32 lanes of CUDA have 16384, 64 of CDNA have 32768
    register_step: int = 8  # they are given to a warp in multiples of it
    tensor_columns: int = 0  # of 128 lanes of 4 bytes: where matrix products stay outside of registers


class Card(NamedTuple):
    """A card: its matrix units, and what each pipe takes for the kinds of instructions that go through it."""

    name: str
    units: int  # SMs or CUs
    ghz: float  # the clock that the published peak is given at
    matrix_flops: Mapping[str, int]  # dense, of a unit in a cycle, by dtype
    pipes: Mapping[str, Mapping[str, float]]  # pipe → kind of instruction (a field of Counts) → cycles
    shared_bytes: int  # of shared memory, of a unit in a cycle
    memory_bytes: float  # from the second-level cache, of a unit in a cycle
    limits: Limits

    def peak_tflops(self, dtype: str) -> float:
        """Dense matrix products of the whole card, in 10¹² operations a second."""
        return self.units * self.ghz * self.matrix_flops[dtype] / 1000


_EVERY_KIND = ("mma", "ex2", "special", "fp32", "fp32_pairs", "alu", "shared", "memory", "local", "shuffle", "other")
_ISSUE = dict.fromkeys(_EVERY_KIND, 1.0)  # one instruction a cycle

# CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions" (results of a cycle and an SM): fp32
# 64 for 8.0, 128 for 8.9, 9.0, 10.0 and 12.0; 2^x, 1/x, log2: 16; integer add, compare, maximum: 64; warp shuffle: 32.
# A warp has 32 lanes and an SM four partitions: 32 / (64 / 4) = 2 cycles, and so on.
_SM_80 = {
    "special": {"ex2": 8.0, "special": 8.0},
    "fp32": {"fp32": 2.0},
    "alu": {"alu": 2.0},
    "shuffle": {"shuffle": 4.0},
    "issue": _ISSUE,
}
# A pair of fp32 operations is issued as one instruction on 10.0, and the published fp32 peak has not doubled with it.
_SM_90 = {**_SM_80, "fp32": {"fp32": 1.0, "fp32_pairs": 2.0}}

# AMD CDNA3 ISA guide and white paper: a wavefront of 64 goes through a vector unit of 16 lanes in 4 cycles, pairs of
# fp32 as well (256 fp32 operations of a CU in a cycle); transcendentals take four times as long. One unit does it all.
_GFX_942 = {
    "vector": {
        "mma": 4.0, "fp32": 4.0, "fp32_pairs": 4.0, "alu": 4.0, "shuffle": 4.0, "ex2": 16.0, "special": 16.0,
    }
}  # fmt: skip

# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and the tuning guides: resident
# warps and blocks, shared memory of an SM, of which a block takes 1 KB for the system; PTX manual: tensor memory.
_OF_8_0 = Limits(16, 32, 164 * 1024, 1024)
_OF_8_9 = Limits(12, 24, 100 * 1024, 1024)
_OF_9_0 = Limits(16, 32, 228 * 1024, 1024)
_OF_10_0 = _OF_9_0._replace(tensor_columns=512)
# CDNA3 ISA guide: vector and accumulation registers are one file of 512, 8 wavefronts of a vector unit, 64 KB of LDS.
_OF_CDNA_3 = Limits(8, 16, 64 * 1024, 0)

# Second-level cache: A100 5120 B of a cycle for the card (A100 white paper); those of the other cards of
# NVIDIA are not published and taken to be the same; MI300X 2048 B for the 38 CUs of a die (CDNA3 white paper).
CARDS = {
    # A100 white paper: 108 SMs, 1.41 GHz, 312 TFLOP/s bf16, 156 tf32, 19.5 fp32; shared memory 128 B a cycle.
    "sm_80": Card("A100", 108, 1.41, {"bf16": 2048, "fp16": 2048, "fp32": 128}, _SM_80, 128, 5120 / 108, _OF_8_0),
    # L40S as published: 142 SMs, 2.52 GHz, 91.6 TFLOP/s fp32, 733 bf16 sparse. Half of that is 366, not the 362 that is
    # published for dense products.
    "sm_89": Card("L40S", 142, 2.52, {"bf16": 1024, "fp16": 1024, "fp32": 256}, _SM_90, 128, 5120 / 142, _OF_8_9),
    # H100 white paper (SXM5): 132 SMs, 1.83 GHz, 989 TFLOP/s bf16 dense, 67 fp32 at 1.98 GHz.
    "sm_90": Card("H100", 132, 1.83, {"bf16": 4096, "fp16": 4096, "fp32": 256}, _SM_90, 128, 5120 / 132, _OF_9_0),
    # Blackwell architecture brief: 148 SMs, 1.85 GHz, 2.25 PFLOP/s bf16 dense of a B200.
    "sm_100": Card("B200", 148, 1.85, {"bf16": 8192, "fp16": 8192, "fp32": 256}, _SM_90, 128, 5120 / 148, _OF_10_0),
    # RTX 5090 as published: 170 SMs, 2.407 GHz, 838 TFLOP/s fp16 sparse. Dense and with sums in fp32 it is a quarter of
    # that, 209.5.
    "sm_120": Card("RTX 5090", 170, 2.41, {"bf16": 512, "fp16": 512, "fp32": 256}, _SM_90, 128, 5120 / 170, _OF_8_9),
    # MI300X data sheet: 304 CUs, 2.1 GHz, 1307 TFLOP/s bf16 dense, 163.4 fp32 matrix and vector; LDS 128 B a cycle.
    "gfx942": Card("MI300X", 304, 2.1, {"bf16": 2048, "fp16": 2048, "fp32": 256}, _GFX_942, 128, 2048 / 38, _OF_CDNA_3),
}
