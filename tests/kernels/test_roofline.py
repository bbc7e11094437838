"""The model of a loop's speed, against rows computed by hand."""

from __future__ import annotations

import pytest

from attnscale.bench.static.cards import CARDS
from attnscale.bench.static.counts import Counts
from attnscale.bench.static.phases import Phases
from attnscale.bench.static.roofline import overhead, roofline
from attnscale.bench.static.table import Row


def row(target: str, loop: Counts, *, name: str = "causal, plain", warps: int = 8) -> Row:
    """A forward over tiles of 128 rows and 64 keys, 64 dimensions: 2·2·128·64·64 operations, 2·64·64·2 bytes."""
    phases = Phases(hot=loop)
    return Row("forward", name, "bf16", 64, target, (128, 64), warps, 3, 200, 0, 49152, 2_097_152, 16384, phases)


@pytest.mark.parametrize(
    ("target", "tflops", "fp32"),
    [
        ("sm_80", 312, 19.5),
        ("sm_89", 366.5, 91.6),
        ("sm_90", 989, 62),
        ("sm_100", 2240, 70),
        ("sm_120", 209.5, 104.8),
        ("gfx942", 1307, 163.4),
    ],
)
def test_rates_of_a_unit_add_up_to_the_published_peak(target: str, tflops: float, fp32: float) -> None:
    assert CARDS[target].peak_tflops("bf16") == pytest.approx(tflops, rel=0.01)
    assert CARDS[target].peak_tflops("fp32") == pytest.approx(fp32, rel=0.01)


def test_a_row_of_the_a100() -> None:
    # Eight warps are two on each of four partitions.
    loop = Counts(
        mma=64, ex2=34, fp32=106, alu=102, shared=38, memory=8, shuffle=8, other=12, total=372, shared_bytes=600
    )

    model = roofline(row("sm_80", loop))

    assert model.cycles["matrix"] == 2_097_152 / 2048 == 1024
    assert model.cycles["special"] == 2 * 34 * 8 == 544  # 4 lanes of a partition: 32 / 4
    assert model.cycles["fp32"] == 2 * 106 * 2 == 424  # 16 lanes
    assert model.cycles["alu"] == 2 * 102 * 2 == 408
    assert model.cycles["shuffle"] == 2 * 8 * 4 == 64
    assert model.cycles["issue"] == 2 * 372 == 744
    assert model.cycles["shared"] == 8 * 32 * 600 / 128 == 1200
    assert model.cycles["memory"] == pytest.approx(16384 * 108 / 5120)
    assert model.bound == "shared"
    assert (model.fastest, model.slowest) == (1200, 2224)
    assert model.fraction_of_peak == (1024 / 2224, 1024 / 1200)


def test_a_row_of_the_h100_has_twice_the_fp32_and_the_matrix_rate() -> None:
    loop = Counts(mma=8, ex2=34, fp32=106, alu=88, total=236)

    model = roofline(row("sm_90", loop))

    assert model.cycles["matrix"] == 512
    assert model.cycles["fp32"] == 2 * 106
    assert model.cycles["special"] == 544
    assert model.bound == "special"


def test_pairs_of_the_b200_are_two_operations_and_one_instruction() -> None:
    model = roofline(row("sm_100", Counts(mma=8, fp32=10, fp32_pairs=30, total=48)))

    assert model.cycles["fp32"] == 2 * (10 + 2 * 30)
    assert model.cycles["issue"] == 2 * 48


def test_one_unit_of_the_mi300x_does_all_but_the_products() -> None:
    loop = Counts(mma=32, ex2=33, fp32=67, fp32_pairs=17, alu=215, shuffle=2, shared=26, total=392, shared_bytes=312)

    model = roofline(row("gfx942", loop, warps=4))

    assert model.cycles["vector"] == 4 * (32 + 67 + 17 + 215 + 2) + 16 * 33 == 1860
    assert model.cycles["matrix"] == 1024
    assert model.cycles["shared"] == 4 * 64 * 312 / 128
    assert model.fraction_of_peak == (1024 / 2884, 1024 / 1860)


def test_overhead_is_against_the_same_kernel_without_statistics() -> None:
    plain = row("sm_80", Counts(mma=64, ex2=100, fp32=100, total=264))
    other = row("sm_90", Counts(mma=64, ex2=100, fp32=10, total=174))
    entropy = row("sm_80", Counts(mma=64, ex2=100, fp32=500, total=664), name="causal, entropy")
    free = row("sm_80", Counts(mma=64, ex2=100, fp32=100, total=264), name="causal, entropy")

    found = overhead(entropy, [other, plain, entropy])

    assert found is not None
    assert found.instructions == pytest.approx(664 / 264 - 1)
    assert found.fastest == pytest.approx(2000 / 1600 - 1)  # from 100·8·2 cycles for 2^x to 500·2·2 for fp32
    assert found.slowest == pytest.approx((1024 + 2000) / (1024 + 1600) - 1)
    assert overhead(free, [plain]) == (0.0, 0.0, 0.0)
    assert overhead(free._replace(tile=(128, 128)), [plain]) == (-0.5, -0.5, -0.5), "the same for twice the scores"
    assert overhead(plain, [plain]) is None
    assert overhead(entropy, [other]) is None
