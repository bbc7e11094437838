"""What the README shows runs, and prints what it says."""

from __future__ import annotations

import ast
import builtins
import csv
import doctest
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import attnscale

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


# The model that the snippets name stands in the README only: nothing is downloaded here.
HUB_MODEL = '"HuggingFaceTB/SmolLM2-135M"'


def names(folder: Path) -> dict[str, object]:
    """What the snippets before one have defined, in a size that is quick."""
    models = importlib.import_module("tiny_models") if find_spec("transformers") else None
    if models is not None:
        models.llama().float().save_pretrained(folder / "model")
    q, k, v = (torch.randn(1, 8, 4096, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return {
        "torch": torch,
        "path": folder / "model",
        "tokens": models and models.TOKENS,
        "attnscale": attnscale,
        "transformers": models and models.transformers,
        "q": q,
        "k": k,
        "v": v,
    }


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_a_snippet_runs(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    block = block.replace(HUB_MODEL, repr(str(tmp_path / "model")))
    if "attnscale.hf." in block:
        pytest.importorskip("transformers", reason="transformers is not installed")
    # What a user sees, who has not chosen triton's interpreter as `conftest` does.
    for module in ("attnscale_kernels.availability", "attnscale.backends.triton"):
        monkeypatch.setattr(importlib.import_module(module), "interpreting", lambda: False)
    if ">>>" in block:
        parsed = doctest.DocTestParser().get_doctest(block, names(tmp_path), "README", None, None)
        assert doctest.DocTestRunner().run(parsed).failed == 0
    else:
        exec(block, names(tmp_path))


def test_snippets_name_nothing_that_was_not_introduced() -> None:
    known = set(dir(builtins))
    for block in BLOCKS:
        examples = doctest.DocTestParser().get_examples(block)
        tree = ast.parse("".join(example.source for example in examples) if examples else block)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
            elif isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
        assert not used - known, block


def test_the_first_screen_has_the_two_commands_and_the_picture() -> None:
    first = "\n".join(README.splitlines()[:32])
    assert "make demo" in first
    assert "make test" in first
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", first)
    assert (ROOT / picture).is_file()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)(.*?)\)", README):
        assert (ROOT / target).exists(), target


def test_figures_are_those_of_the_committed_tables() -> None:
    with (ROOT / ".github/assets/bench_cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = {(row["provider"], row["mode"], row["metric"], row["x"]): f"{float(row['y']):.2f}" for row in rows}
    for provider in ("constant", "sqrt_log", "log", "log_squared"):
        shown = [
            measured[provider, mode, "time_ratio", length]
            for length in ("512", "2048", "8192")
            for mode in ("forward", "forward+backward")
        ]
        assert f"| `{provider}` | {' | '.join(shown)} |" in README
    shown = [measured["stats_all_rows", "forward", "time_ratio", length] for length in ("2048", "4096", "8192")]
    assert f"| statistics of all rows, forward | {' | '.join(shown)} |" in README
    with (ROOT / ".github/assets/temperature.csv").open(newline="") as file:
        w_max = {(row["policy"], row["length"]): float(row["w_max"]) for row in csv.DictReader(file)}
    assert f"{w_max['constant', '8192']:.3f} at 8192 keys" in README


def test_figures_of_models_are_those_of_the_committed_tables() -> None:
    with (ROOT / ".github/assets/bench_cpu.csv").open(newline="") as file:
        rows = {(row["provider"], row["mode"]): float(row["y"]) for row in csv.DictReader(file) if row["x"] == "4096"}
    for mode, text in (("prefill", "prefill"), ("decode", "decoding a token")):
        assert f"| {text} | {rows['log', mode]:.2f} |" in README
        assert f"| {text}, padded | {rows['log_padded', mode]:.2f} |" in README
    with (ROOT / ".github/assets/perplexity.csv").open(newline="") as file:
        table: dict[tuple[str, ...], list[str]] = {}
        for row in csv.DictReader(file):
            shown = table.setdefault((row["policy"], row["parameters"], row["rope"]), [])
            shown.append(f"{float(row['perplexity']):.2f}")
    assert len(table) > 1
    for perplexities in table.values():
        assert f" | {' | '.join(perplexities)} |" in README
