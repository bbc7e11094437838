"""Score families of a user: the file, its faults, the settings, and the measurement of Λ, N(t) and the exponent."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale.cli import main
from attnscale.errors import ArgumentError, ArgumentTypeError
from attnscale.theory import experiments, user_family
from attnscale.theory.user_family import Settings, UserFamily, find_family, measure

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "examples" / "score_family.py"
SHORT = Settings(n=(16, 64, 256), quick=True)
DRAW = "import torch\ndef draw(n, generator):\n    return torch.randn(8, n, generator=generator)\n"


def levels(gap: Any) -> UserFamily:
    """One key ahead of all others by gap(n): Λ = ln n/gap(n), without randomness."""

    def draw(n: int, generator: torch.Generator) -> torch.Tensor:
        scores = torch.full((n,), -gap(n), dtype=torch.float64)
        scores[0] = 0.0
        return scores

    return UserFamily("levels", draw)


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


@settings(max_examples=25, deadline=None)
@given(st.floats(-1.5, 3.0), st.floats(0.1, 10.0))
def test_the_fit_finds_the_power_of_ln_n(p: float, sigma: float) -> None:
    family = levels(lambda n: math.log(n) ** (1 - p))
    found = measure(family, Settings(n=(8, 32, 128), sigma=sigma, quick=True))
    assert found.exponent.value == pytest.approx(p, abs=1e-9)
    for row in found.scales:
        assert row["median"] == pytest.approx(math.log(row["n"]) ** p / sigma, rel=1e-9)


@pytest.mark.parametrize(
    ("gap", "policy"),
    [
        (lambda n: math.log(n), "constant"),
        (lambda n: math.log(n) ** 0.5, "sqrt_log"),
        (lambda n: 0.7, "log"),
        (lambda n: 1 / math.log(n), "log_squared"),
        (lambda n: math.log(n) / n**0.4, "power"),
    ],
)
def test_the_suggested_policy_has_the_law_of_the_scale(gap: Any, policy: str) -> None:
    found = measure(levels(gap), SHORT)
    assert found.policy == policy
    assert f"policy {policy}" in found.summary
    if policy == "power":
        assert found.power.value == pytest.approx(0.4, abs=1e-9)


def test_an_exponent_without_a_law_is_reported() -> None:
    assert "gap_adaptive" in measure(levels(lambda n: math.log(n) ** -2.0), SHORT).summary  # (ln n)³


def test_random_scores_have_the_exponent_of_their_law_within_its_error() -> None:
    found = measure(find_family(EXAMPLE), Settings(quick=True))
    assert {line.agreement for line in found.comparisons} == {"yes"}
    assert abs(found.exponent.value - 1) < 3 * found.exponent.error
    assert 0 < found.exponent.error < 0.05


@pytest.mark.parametrize("name", ["simplex", "cluster", "three_level"])
def test_a_family_of_the_package_is_found_by_name_and_has_its_exact_law(name: str) -> None:
    lines = measure(find_family(name), SHORT).comparisons
    assert [line.agreement for line in lines if line.quantity == "median Λ"] == ["equal"] * 3


def test_gap_counts_are_those_of_the_scaled_scores() -> None:
    family = levels(lambda n: 0.5)
    found = measure(family, Settings(n=(16, 64, 256), t=(1.5, 0.5), sigma=2.0, quick=True))
    assert [(row["n"], row["t"], row["measured"]) for row in found.counts] == [
        (n, t, count) for n in (16, 64, 256) for t, count in ((0.5, 1.0), (1.5, n))
    ]


def test_one_row_per_call_and_many_rows_per_call_give_the_same_scores() -> None:
    def one(n: int, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(n, generator=generator, dtype=torch.float64)

    def three(n: int, generator: torch.Generator) -> torch.Tensor:
        return torch.stack([one(n, generator) for _ in range(3)])

    drawn = [UserFamily("x", draw).sample(10, 7, torch.Generator().manual_seed(0)) for draw in (one, three)]
    assert drawn[0].shape == (7, 10)
    assert torch.equal(*drawn)


def test_a_measurement_repeats() -> None:
    first, second = (measure(find_family(EXAMPLE), SHORT) for _ in range(2))
    assert first == second


FAULTS = {
    "a syntax error": ("def draw(n, generator)\n", "line 1: SyntaxError"),
    "a missing import": ("import torch\nimport no_such_module\n", "line 2: ModuleNotFoundError"),
    "an exit": ("raise SystemExit(3)\n", "line 1: SystemExit: 3"),
    "no function": ("import torch\n", r"draw\(n, generator\); draw is missing"),
    "no callable": ("draw = 3\n", "draw is 3"),
    "a failing function": ("def draw(n, generator):\n    return 1 / 0\n", r"draw\(n=16.*line 2: ZeroDivisionError"),
    "too few arguments": ("def draw(n):\n    return n\n", r"draw\(n=16.*TypeError"),
    "a list": ("def draw(n, generator):\n    return [0.0] * n\n", r"\[16\] or \[rows, 16\], not list"),
    "a wrong length": (f"{DRAW[:-1]}[:, 1:]\n", r"\[16\] or \[rows, 16\].*\[8, 15\]"),
    "three axes": (f"{DRAW[:-1]}[None]\n", r"shape \[1, 8, 16\]"),
    "no rows": (f"{DRAW[:-1]}[:0]\n", r"shape \[0, 16\]"),
    "integers": (f"{DRAW[:-1]}.long()\n", r"torch\.int64"),
    "nan": (f"{DRAW[:-1]}.log()\n", "finite scores, not nan"),
    "infinity": (f"{DRAW[:-1]} / 0\n", "finite scores, not -?inf"),
    "ties": (f"{DRAW[:-1]} * 0\n", "at n=16 .* tie"),
    "an exponent of text": (f"{DRAW}EXPONENT = 'one'\n", "EXPONENT is 'one'"),
    "a law that is no function": (f"{DRAW}accumulation = 2.0\n", r"accumulation is 2\.0"),
    "a law that is no number": (f"{DRAW}def accumulation(n):\n    return 'x'\n", r"accumulation\(n=16\).*'x'"),
    "a law below zero": (f"{DRAW}def accumulation(n):\n    return -1\n", r"accumulation\(n=16\).*not -1"),
    "a failing law": (f"{DRAW}def accumulation(n):\n    return 1 / 0\n", r"accumulation\(n=16\).*line 5: ZeroDivision"),
    "an odd flag": (f"{DRAW}ASYMPTOTIC = 'no'\n", "ASYMPTOTIC is 'no'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_file_is_a_typed_error_that_quotes_the_file(fault: str, tmp_path: Path) -> None:
    text, message = FAULTS[fault]
    path = written(tmp_path, text)
    with pytest.raises(ArgumentError, match=message) as raised:
        measure(find_family(path), SHORT)
    assert "mine.py' is not accepted: expected" in str(raised.value)


def test_a_file_that_does_not_exist_is_quoted_with_the_names_that_do() -> None:
    with pytest.raises(ArgumentError, match=r"family='nowhere\.py' .*gaussian"):
        find_family("nowhere.py")


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": ()},
        {"n": (64, 128)},
        {"n": (64, 64, 128)},
        {"n": (1, 64, 128)},
        {"n": (64, 128, 2**23)},
        {"t": ()},
        {"t": (0.0,)},
        {"t": (math.nan,)},
        {"t": (math.inf,)},
        {"sigma": 0.0},
        {"sigma": -1.0},
        {"sigma": math.nan},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(wrong))}="):
        Settings(**wrong)


@pytest.mark.parametrize("wrong", [{"n": (8.5, 9, 10)}, {"t": ("x",)}, {"sigma": "1"}], ids=str)
def test_settings_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{next(iter(wrong))}="):
        Settings(**wrong)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_command_measures_the_example_and_writes_a_table_for_every_picture(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    words = ["--family", str(EXAMPLE), "--n", "16:128", "--t", "0.5,0.7,0.9,1,2", "--sigma", "1.5", "--quick"]
    assert main(["theory", "gaps", *words, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed[:-1])) <= int(columns)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    for stem in ("gaps_score_family_accumulation", "gaps_score_family_counts"):
        assert {f"{stem}.csv", f"{stem}.png", f"{stem}.svg"} <= written
    scales = read(tmp_path / "out" / "gaps_score_family_accumulation.csv")
    assert [row["n"] for row in scales] == ["16", "32", "64", "128"]
    counts = read(tmp_path / "out" / "gaps_score_family_counts.csv")
    assert len(counts) == 4 * 5
    # Every number of the tables is printed whole: none is folded over two lines.
    words = {word for line in printed for word in line.split()}
    for row in scales:
        assert {row["n"], f"{float(row['median']):.5g}", f"{float(row['median_error']):.2g}"} <= words
    for row in read(tmp_path / "out" / "gaps_score_family_comparisons.csv"):
        assert {f"{float(row['predicted']):.5g}", f"{float(row['relative_error']):+.1e}", row["agree"]} <= words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gaps", "--n", "64:4096"], "n='64:4096'"),
        (["gaps", "--t", "1"], "t='1'"),
        (["condensation", "--sigma", "2"], "sigma='2'"),
        (["sphere", "--family", "FILE"], "NAME sphere"),
        (["all", "--family", "FILE"], "NAME all"),
        (["gaps", "--family", "FILE", "--n", "many"], "n='many'"),
        (["gaps", "--family", "FILE", "--n", "64,128"], "n=(64, 128)"),
        (["gaps", "--family", "FILE", "--n", "1:4"], "n=1 "),
        (["gaps", "--family", "FILE", "--t", "0.5,,1"], "t=''"),
        (["gaps", "--family", "FILE", "--t", "-1"], "t=-1.0"),
        (["gaps", "--family", "FILE", "--sigma", "wide"], "sigma='wide'"),
        (["gaps", "--family", "FILE", "--sigma", "0"], "sigma=0.0"),
        (["gaps", "--output", "FILE"], "output="),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_and_leaves_no_file(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(EXAMPLE) if word == "FILE" else word for word in words]
    with pytest.raises(SystemExit) as exit_:
        main(["theory", *words])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["a missing import", "no function", "a wrong length", "nan"])
def test_a_fault_in_the_file_ends_the_command_with_exit_code_two_and_no_file(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, FAULTS[fault][0])
    words = ["--family", str(path), "--quick", "--output", str(tmp_path / "out")]
    assert main(["theory", "gaps", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ArgumentError: family='{path}'")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_with_a_dataclass_can_be_read(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n"
    text += "@dataclass\nclass Law:\n    rows: int = 3\n"
    text += "def draw(n, generator):\n    return torch.rand(Law().rows, n, generator=generator)\n"
    assert find_family(written(tmp_path, text)).sample(4, 5, torch.Generator()).shape == (5, 4)


def test_a_file_without_predictions_has_no_comparisons(tmp_path: Path) -> None:
    found = measure(find_family(written(tmp_path, DRAW)), SHORT)
    assert found.comparisons == []
    experiments.write(user_family.experiment(found), tmp_path / "out")
    assert {row["predicted"] for row in read(tmp_path / "out" / "gaps_mine_accumulation.csv")} == {""}
