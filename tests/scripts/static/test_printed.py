"""The printed table of compilation results."""

from __future__ import annotations

import pytest

from scripts.static.__main__ import main
from scripts.static.counts import Counts, Phases
from scripts.static.printed import HEADER, static_lines
from scripts.static.table import KernelRow
from scripts.static.targets import TARGETS


def compiled_row(name: str, **numbers: object) -> KernelRow:
    fields = {
        "family": "forward",
        "name": name,
        "dtype": "bf16",
        "dim": 128,
        "target": "sm_90",
        "tile": (128, 64),
        "warps": 8,
        "stages": 3,
        "registers": 168,
        "spills": 0,
        "shared_memory": 98304,
        "tensor_columns": 0,
        "matrix_flops": 2 * 2 * 128 * 64 * 128,
        "tile_bytes": 2 * 64 * 128 * 2,
    }
    phases = Phases(hot=Counts(mma=16, ex2=32, fp32=200, total=400), after=Counts(mma=16, ex2=32, fp32=300, total=500))
    return KernelRow(**{**fields, "phases": phases, **numbers})


def test_the_table_shows_what_was_compiled_and_what_statistics_add() -> None:
    rows = [
        compiled_row("causal, plain"),
        compiled_row("causal, entropy", phases=Phases(hot=Counts(mma=16, ex2=32, fp32=232, total=440))),
        compiled_row("n = 1024", family="softmax", dim=0, matrix_flops=0, spills=12),
    ]
    plain, entropy, softmax = (dict(zip(HEADER, line, strict=True)) for line in static_lines(rows))
    assert (plain["target"], plain["tile"], plain["regs"], plain["shared"]) == ("sm_90 H100", "128×64", "168", "98304")
    # 168 registers allow 3 warps per partition, 12 of the 16 that two blocks would need.
    assert (plain["blocks"], plain["KB"], plain["MFLOP"]) == ("1", "32", "4.2")
    assert (plain["hot"], plain["edge"], plain["+ statistics"]) == ("12.5", "15.6", "")
    # 56 of 72 tiles are hot, and 1024·1025/2 of their 72·128·64 scores are visible
    assert (plain["n=1k"], plain["over hot"]) == (f"{(56 * 400 + 16 * 500) * 256 / (1024 * 1025 / 2):.1f}", "1.06")
    assert entropy["+ statistics"] == "+10%"
    assert (softmax["D"], softmax["spills"], softmax["KB"], softmax["MFLOP"]) == ("", "12", "", "")
    assert (softmax["hot"], softmax["n=1k"], softmax["over hot"]) == ("12.5", "", "")


def test_the_committed_table_is_printed_for_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print"]) == 0
    printed = capsys.readouterr().out
    assert "compiled ahead of time, not run" in printed
    assert "Nothing was timed." in printed
    for target, about in TARGETS.items():
        assert f"{target} {about.card}" in printed
    for family in ("forward", "reference", "backward dQ", "backward dK dV", "gap bracket", "decode split"):
        assert f"{family} · " in printed
