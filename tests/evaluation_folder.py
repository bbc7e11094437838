"""A folder as written by `attnscale evaluate`, with synthetic numbers that follow a plausible law.

Recall is an increasing function of r = β/Λ of one head, and Λ grows with the length; β above 1 costs bits per byte. The
expected content of the page is therefore known.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path

TRAINED = 128
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LAWS: dict[str, Callable[[float], float]] = {
    "constant": lambda n: 1.0,
    "sqrt_log": lambda n: math.sqrt(math.log(n) / math.log(TRAINED)),
    "log": lambda n: math.log(n) / math.log(TRAINED),
    "log_squared": lambda n: (math.log(n) / math.log(TRAINED)) ** 2,
}
RESULTS = "task,metric,model,policy,length,bin,value,low,high,difference,difference_low,difference_high,samples"
HEADS = (
    "task,model,policy,length,layer,head,rows,visible,beta,w_max,entropy,accumulation_2,accumulation_8,accumulation_16,"
    "accumulation_2_without_first,accumulation_8_without_first,accumulation_16_without_first,criticality"
)
BEST = ("model.layers.1.self_attn", 2)  # the retrieval head


def write_folder(
    path: Path,
    *,
    gain: float = 1.0,
    cost: float = 0.6,
    width: float = 0.03,
    tasks: Iterable[str] = ("multi_needle", "perplexity"),
    models: Iterable[str] = ("seed0", "seed1"),
    policies: Iterable[str] = tuple(LAWS),
    argmax: bool = False,
) -> Path:
    """`gain` scales the effect of a law on retrieval, `cost` on prose; `width` is half of a 95 % interval."""
    path.mkdir(parents=True, exist_ok=True)
    models, tasks, policies = tuple(models), tuple(tasks), (*policies, *(["argmax"] if argmax else []))
    noise, results, heads, costs = random.Random(0), [], [], []
    for task in tasks:
        for policy in policies:
            for length in LENGTHS:
                for model in (*models, "all"):
                    results += result_rows(task, model, policy, length, gain, cost, width)
                    if model != "all":
                        heads += head_rows(task, model, policy, length, noise)
                        costs.append((task, model, policy, length, 0.01 * length**0.9, 300 + length / 40))
    write_csv(path / "results.csv", RESULTS, results)
    write_csv(path / "statistics.csv", HEADS, heads)
    write_csv(path / "cost.csv", "task,model,policy,length,seconds,peak_mb", costs)
    laws = {policy: {"name": policy, "reference_length": TRAINED, "floor": True} for policy in policies[1:]}
    run = {
        "attnscale": "0.2.0",
        "spec": {"models": models, "windows": 8, "text": None},
        "models": {name: {"fingerprint": f"f1{name}", "trained_length": TRAINED} for name in models},
        "policies": {"constant": {"name": "constant", "beta": 1.0}, **laws},
        "command": f"attnscale evaluate --models {','.join(models)} --lengths 64:16384 --output {path}",
    }
    (path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    return path


def beta(policy: str, length: int) -> float:
    return 50.0 if policy == "argmax" else max(1.0, LAWS[policy](length))


def accumulation(length: int) -> float:
    return 0.55 * (length / TRAINED) ** 0.17


def recall(policy: str, length: int, gain: float, model: str) -> float:
    """An increasing function of r, the same for all lengths, with small differences between seeds."""
    effective = 1 + gain * (beta(policy, length) - 1)
    shift = {"seed1": 0.03}.get(model, 0.0)
    return 0.96 / (1 + (effective / accumulation(length)) ** -4) - shift


def prose(policy: str, length: int, cost: float) -> float:
    beyond = max(0.0, math.log2(length / TRAINED))
    return 2.0 + 0.06 * beyond + cost * (min(beta(policy, length), 4) - 1) ** 2 / 3


def result_rows(
    task: str, model: str, policy: str, length: int, gain: float, cost: float, width: float
) -> list[tuple[object, ...]]:
    def row(metric: str, place: str, value: float, base: float) -> tuple[object, ...]:
        change = value - base
        differences = ("", "", "") if policy == "constant" else (change, change - width, change + width)
        return (task, metric, model, policy, length, place, value, value - width, value + width, *differences, 8)

    if task == "perplexity":
        whole = row("bits_per_byte", "", prose(policy, length, cost), prose("constant", length, cost))
        bins = [
            row("bits_per_byte", f"{end // 2}-{end}", prose(policy, end, cost), prose("constant", end, cost))
            for end in LENGTHS
            if end <= length
        ]
        return [whole, *bins]
    value, base = recall(policy, length, gain, model), recall("constant", length, gain, model)
    depths = [
        row("accuracy", f"{0.2 * place:.1f}-{0.2 * place + 0.2:.1f}", value * (0.8 + 0.05 * place), base)
        for place in range(5)
    ]
    return [row("accuracy", "", value, base), *depths]


def head_rows(task: str, model: str, policy: str, length: int, noise: random.Random) -> Iterable[tuple[object, ...]]:
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.2.self_attn"):
        for head in range(4):
            scale = accumulation(length) * (1 if (layer, head) == BEST else 2 + noise.random())
            r = beta(policy, length) / scale
            w_max = 0.9 / (1 + r**-4)
            entropy = (1 - w_max) * math.log(length)
            ranks = (1.2 * scale, scale, 0.9 * scale)
            numbers = (256, length, beta(policy, length), w_max, entropy, *ranks, *ranks)
            # argmax has no finite β and therefore no criticality.
            yield (task, model, policy, length, layer, head, *numbers, "" if policy == "argmax" else r)


def write_csv(path: Path, header: str, rows: Iterable[tuple[object, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header.split(","))
        writer.writerows([f"{x:.6g}" if isinstance(x, float) else x for x in row] for row in rows)
