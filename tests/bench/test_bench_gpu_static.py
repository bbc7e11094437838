"""`attnscale bench gpu --static`: the compile-time table, printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnscale.bench.gpu import compiled
from attnscale.bench.static.counts import Counts
from attnscale.bench.static.phases import Phases
from attnscale.bench.static.table import Row, static_table
from attnscale.bench.static.targets import TARGETS
from attnscale.cli import main


def compiled_row(name: str, **numbers: object) -> Row:
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
        "matrix_flops": 2 * 2 * 128 * 64 * 128,
        "tile_bytes": 2 * 64 * 128 * 2,
    }
    phases = Phases(hot=Counts(mma=16, ex2=32, fp32=200, total=400), after=Counts(mma=16, ex2=32, fp32=300, total=500))
    return Row(**{**fields, "phases": phases, **numbers})


def test_the_static_table_shows_what_was_compiled_and_what_statistics_add(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        compiled_row("causal, plain"),
        compiled_row("causal, entropy", phases=Phases(hot=Counts(mma=16, ex2=32, fp32=232, total=440))),
        compiled_row("n = 1024", family="softmax", dim=0, matrix_flops=0, spills=12),
    ]
    monkeypatch.setattr(compiled, "static_table", lambda: rows)
    monkeypatch.setenv("COLUMNS", "250")
    plain, entropy, softmax = (dict(zip(compiled.HEADER, line, strict=True)) for line in compiled.static_lines())
    assert (plain["target"], plain["tile"], plain["regs"], plain["shared"]) == ("sm_90 H100", "128×64", "168", "98304")
    assert (plain["hot"], plain["edge"], plain["+ statistics"]) == ("12.5", "15.6", "")
    # 56 tiles of 72 are hot, and 1024·1025/2 of their 72·128·64 scores count
    assert (plain["n=1k"], plain["over hot"]) == (f"{(56 * 400 + 16 * 500) * 256 / (1024 * 1025 / 2):.1f}", "1.06")
    assert re.fullmatch(r"\+10% \(\+\d+% … \+\d+%\)", entropy["+ statistics"])
    assert re.fullmatch(r"\d+% … \d+%", plain["of peak"])
    assert (softmax["D"], softmax["spills"], softmax["of peak"], softmax["bound by"]) == ("", "12", "", "")
    assert (softmax["hot"], softmax["n=1k"], softmax["over hot"]) == ("12.5", "", "")
    assert main(["bench", "gpu", "--static"]) == 0
    printed = capsys.readouterr().out
    assert "compiled ahead of time, not run" in printed
    assert "Nothing here was timed." in printed
    assert printed.count("sm_90 H100") == 3


def test_a_table_that_is_not_there_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "static_table", lambda: static_table(tmp_path / "resources.json"))
    assert main(["bench", "gpu", "--static"]) == 2
    message = capsys.readouterr().err
    assert f"BackendError: {tmp_path / 'resources.json'} is missing" in message
    assert "python -m attnscale.bench.static --write" in message


def test_the_static_table_is_that_of_the_package() -> None:
    found = {(line[0], line[4].split()[0]) for line in compiled.static_lines()}
    assert {"forward", "backward dQ", "backward dK dV"} <= {family for family, _ in found}
    assert {target for _, target in found} == set(TARGETS)
