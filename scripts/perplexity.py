"""Perplexity of SmolLM2-135M on enwik8 under temperature policies, from 2048 to 16384 tokens of context.

make perplexity                             # fetches the model once and writes .github/assets/perplexity.csv
python scripts/perplexity.py --windows 4    # more text: each setting and window is a forward of 16384 tokens in fp32
python scripts/perplexity.py --longest 8192 # a third of the time; a later run adds the longer contexts
python scripts/perplexity.py --again        # measure what the table already holds, too

The model was trained to 8192 tokens. A setting is in the table once all its windows are measured: a run that was
interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import attnscale
from attnscale.bench.perplexity import Row, losses, read_table, rows_of, write_table

ROOT = Path(__file__).resolve().parent.parent
FOLDER, TABLE = ROOT / ".cache" / "smollm2", ROOT / ".github" / "assets" / "perplexity.csv"
TRAINED = 8192
CONTEXTS = (2048, 4096, 8192, 16384)

# YaRN brings a temperature of its own, (0.1·ln 2 + 1)² = 1.14 on the logits at all lengths; without it, a policy takes
# its place.
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": TRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "own": {},
    "yarn": YARN,
    "yarn without temperature": YARN | {"attention_factor": 1.0},
}

# The first is what all are compared with; then by how much one would want to know them.
SETTINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("constant", {}, "own"),
    ("log", {"reference_length": TRAINED, "floor": True}, "own"),
    ("constant", {}, "yarn"),
    ("log", {"reference_length": TRAINED, "floor": True}, "yarn without temperature"),
    ("log", {"reference_length": 2048}, "own"),
    ("log", {"reference_length": TRAINED}, "own"),
    ("sqrt_log", {"reference_length": TRAINED}, "own"),
    ("constant", {}, "yarn without temperature"),
    ("log", {"reference_length": 2048, "floor": True}, "own"),
)


def main() -> None:
    """Measure what the table lacks, setting by setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1, help="pieces of text (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=max(CONTEXTS), help="leave longer contexts for another time")
    parser.add_argument("--model", type=Path, default=FOLDER, help="what scripts/smollm2.py made")
    parser.add_argument("--output", type=Path, default=TABLE, help="CSV to write")
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    options = parser.parse_args()
    table = [] if options.again else [row for row in read_table(options.output) if row.windows == options.windows]
    contexts = [context for context in CONTEXTS if context <= options.longest]
    tokens = read_windows(options.model, options.windows)
    for number, (policy, parameters, rope) in enumerate(SETTINGS):
        known = {row.context for row in table if is_of(row, policy, parameters, rope)}
        missing = [context for context in contexts if context not in known]
        if not missing:
            continue
        started = time.perf_counter()
        model = load(options.model, rope)
        with attnscale.hf.apply(model, policy, on_existing="compose", **parameters):
            found = [losses(model, window[None, : max(missing) + 1], missing) for window in tokens]
        base = {row.context: row.nats_per_token for row in table if is_of(row, *SETTINGS[0])} if number else None
        rows = rows_of(policy, parameters, rope, found, base)
        table = sorted([*table, *rows], key=place)
        write_table(options.output, table)
        print(f"{policy} {parameters} rope {rope}: {time.perf_counter() - started:.0f} s")
        for row in rows:
            print(f"  {row.context:6d}  perplexity {row.perplexity:.3f}  ratio {row.ratio_to_constant:.4f}", flush=True)


def place(row: Row) -> tuple[int, int]:
    """Where a line stands in the table: in the order of the settings, then of the contexts."""
    return next(number for number, setting in enumerate(SETTINGS) if is_of(row, *setting)), row.context


def is_of(row: Row, policy: str, parameters: dict[str, Any], rope: str) -> bool:
    """Whether a line of the table belongs to a setting."""
    return (row.policy, json.loads(row.parameters), row.rope) == (policy, parameters, rope)


def read_windows(folder: Path, windows: int) -> torch.Tensor:
    """Pieces of enwik8, evenly spread over it: [windows, longest context + 1] tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text, length = (folder / "enwik8").read_bytes(), max(CONTEXTS) + 1
    pieces = []
    for number in range(windows):
        start = (2 * number + 1) * len(text) // (2 * windows)
        piece = text[start : start + 8 * length].decode("utf-8", errors="ignore")  # 8: a token has 3 or 4 bytes
        pieces.append(torch.tensor(tokenizer(piece, add_special_tokens=False).input_ids[:length]))
    return torch.stack(pieces)


def load(folder: Path, rope: str) -> torch.nn.Module:
    """The model in fp32, with its own RoPE or another."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = dict(config.rope_parameters) | ROPES[rope]
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval()


if __name__ == "__main__":
    main()
