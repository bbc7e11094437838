"""The committed results of `make test-serving`, and what the page says about them."""

from __future__ import annotations

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "attnscale/serve/README.md").read_text(encoding="utf-8")
with (ROOT / ".github/assets/serving.csv").open(encoding="utf-8", newline="") as stream:
    ROWS = list(csv.DictReader(stream))
MODELS = ("llama", "qwen3", "mistral", "gemma3")
TITLES = {"vllm": "native", "transformers": "`--model-impl transformers`"}


def shown(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def test_the_page_shows_the_largest_differences_of_the_table() -> None:
    for backend, title in TITLES.items():
        for mode in ("eager", "compiled"):
            key = (backend, mode, "float32")
            of_key = [row for row in ROWS if (row["backend"], row["mode"], row["dtype"]) == key]
            worst = [max(float(row["difference"]) for row in of_key if row["model"] == model) for model in MODELS]
            assert f"| {title}, {mode} | {' | '.join(map(shown, worst))} |" in PAGE


def test_the_page_shows_how_far_the_engine_is_off_at_beta_1() -> None:
    matrix = [row for row in ROWS if row["mode"] in ("eager", "compiled") and row["dtype"] == "float32"]
    lowest = [min(float(row["at_beta_1"] or 9) for row in matrix if row["model"] == model) for model in MODELS]
    assert f"| smallest difference at β = 1 | {' | '.join(f'{value:.2g}' for value in lowest)} |" in PAGE


def test_only_the_rows_that_the_page_names_miss_their_limit() -> None:
    missed = [row for row in ROWS if row["passed"] != "True"]
    assert [(row["model"], row["policy"], row["backend"], row["dtype"]) for row in missed] == [
        ("qwen3", "log_squared", "vllm", "bfloat16"),
        ("qwen3", "log_squared", "transformers", "bfloat16"),
    ]
    for row in missed:
        difference, without = float(row["difference"]), float(row["limit"]) / 2
        assert f"({difference:.3f}, {difference / without:.1f}×)" in PAGE
    assert "30 of 32" in PAGE
    assert len([row for row in ROWS if row["dtype"] == "bfloat16" and row["policy"] != "stock"]) == 32


def test_the_page_shows_the_real_model() -> None:
    for row in ROWS:
        if row["model"].startswith("SmolLM2"):
            length = row["mode"].split()[1]
            without = shown(float(row["limit"]) / 2)
            beta_1 = f"{float(row['at_beta_1']):.3g}"
            assert f"| {length} | {shown(float(row['difference']))} | {without} | {beta_1} |" in PAGE
