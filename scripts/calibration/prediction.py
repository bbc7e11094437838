"""Calibration against what is measured at the full length, on models that were used for nothing else.

make calibration     # trains the models with scripts.training, in two hours on one core, and writes the tables

Each model is calibrated at 1× to 4× its trained length, for two growths of the number of needles. Then its Λ, its
accuracy under β = 1 and under hard argmax, and the laws are measured up to 128×. `prediction_tables` compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attnscale.hf
from attnscale.lab.calibration import Calibration, calibrate
from attnscale.lab.calibration.measuring import measure_prompt
from attnscale.lab.calibration.reading import Needles, prompt, score, summary
from attnscale.lab.inputs import ModelFolder, Text
from attnscale.lab.results import Cells
from attnscale.lab.sequences import BYTES

RECIPES = ("decay", "no_decay")
SEEDS = (20, 21, 22, 23, 24)
GROWTHS = (1.0, 0.5)
TRAINED, TARGET = 128, 16384
LAWS = ("sqrt_log", "log", "log_squared")
ARGMAX = "argmax=constant:beta=1e6"
SHORTER = (256, 512, 1024, 2048, 4096, 8192)  # lengths of the accuracy curve below the target
SCALES_AT = (4096, 16384)  # 32× and 128×
SAMPLES = 4
CHUNK = 512  # the fastest on a CPU
NEEDLES = 4  # at the trained length

TEXT, HELD_OUT = ("attnscale/lab/embedded/train.txt", "attnscale/lab/embedded/held_out.txt")
MODELS = Path("runs/calibration")
RUNS = Path("runs/calibration_prediction")

Progress = Callable[[int, int, str], None]
Report = Callable[[str], None]


class Case(NamedTuple):
    """One model with one growth of needles."""

    recipe: str
    seed: int
    growth: float

    @property
    def folder(self) -> Path:
        return RUNS / f"{self.recipe}-{self.seed}-{self.growth:g}"

    @property
    def model(self) -> str:
        return str(MODELS / self.recipe / f"constant-{self.seed}")


def cases() -> Iterator[Case]:
    """Yield every case, the constant density of needles first."""
    for growth in GROWTHS:
        for recipe in RECIPES:
            for seed in SEEDS:
                yield Case(recipe, seed, growth)


def run(progress: Progress) -> None:
    """Calibrate and measure every case; an interrupted run continues from its cells."""
    torch.set_num_threads(1)
    every = list(cases())
    for number, case in enumerate(every):

        def report(text: str, number: int = number, case: Case = case) -> None:
            progress(number, len(every), f"{case.folder.name}: {text}")

        calibrate(options(case), lambda done, total, text, report=report: report(text))  # type: ignore[misc]
        _observe(case, report)


def options(case: Case) -> Calibration:
    """Return the calibration of a case. The fit is compared with single laws for one growth only."""
    style = {name: getattr(BYTES, name) for name in BYTES.__dataclass_fields__}
    return Calibration(
        model=case.model,
        to=TARGET,
        output=str(case.folder),
        text=TEXT,
        held_out=HELD_OUT,
        tasks=("perplexity", "multi_needle"),
        policies=(*LAWS, ARGMAX),
        fit=case.growth == GROWTHS[0],
        asked=128,
        needles=NEEDLES,
        needle_growth=case.growth,
        fit_length=4096,
        fit_sequences=4,
        fit_rounds=3,
        learning_rate=0.05,
        tests=SAMPLES,
        test_windows=0,
        windows=2,
        chunk=CHUNK,
        **style,
    )


@dataclass(frozen=True)
class Observed:
    """What was measured at the full lengths.

    Attributes:
        accuracy: policy → length → accuracy, for constant and argmax, below the target length.
        rows: length → cells of `measure_prompt`.
    """

    accuracy: dict[str, dict[int, float]]
    rows: dict[int, list[dict[str, Any]]]


def _observe(case: Case, report: Report) -> None:
    """Compute the missing cells of what is compared with the predictions."""
    folder = ModelFolder.at(case.model, "float32")
    text = Text.read(HELD_OUT, folder.tokenizer())
    model = folder.load()
    needles = Needles(BYTES, NEEDLES, case.growth, 128)
    cells = Cells(case.folder / "observed")
    for policy, beta in (("constant", 1.0), ("argmax", 1e6)):
        with attnscale.hf.apply(model, "constant", beta=beta, layers="full"), torch.inference_mode():
            for length in SHORTER:
                for sample in range(SAMPLES):
                    key = {"task": "accuracy", "policy": policy, "length": length, "sample": sample}
                    if cells.read(key) is None:
                        report(f"accuracy of {policy} at {length}")
                        sequence = prompt(text, needles, length, TRAINED, "observed", length, sample)
                        silent = sequence.with_text(torch.zeros_like(sequence.text))
                        result = summary(silent, score(model, silent, CHUNK), text, [0, length])
                        cells.write(key, result=result)
            for length in SCALES_AT if policy == "constant" else ():
                for sample in range(SAMPLES):
                    key = {"task": "rows", "length": length, "sample": sample}
                    if cells.read(key) is None:
                        report(f"Λ at {length}")
                        sequence = prompt(text, needles, length, TRAINED, "observed", length, sample)
                        cells.write(key, result=measure_prompt(model, sequence, CHUNK))


def is_done(case: Case) -> bool:
    """Whether everything of a case is measured."""
    expected = SAMPLES * (2 * len(SHORTER) + len(SCALES_AT))
    measured = len(list((case.folder / "observed").glob("*.json")))
    return (case.folder / "calibration.json").is_file() and measured == expected


def read_observed(case: Case) -> Observed:
    """Return the measurements of a case."""
    cells = Cells(case.folder / "observed")
    accuracy: dict[str, dict[int, float]] = {}
    for policy in ("constant", "argmax"):
        for length in SHORTER:
            keys = [{"task": "accuracy", "policy": policy, "length": length, "sample": s} for s in range(SAMPLES)]
            correct = [x for key in keys for x in (cells.read(key) or {"result": {"correct": []}})["result"]["correct"]]
            accuracy.setdefault(policy, {})[length] = sum(correct) / len(correct)
    rows = {
        length: [
            found["result"]
            for s in range(SAMPLES)
            if (found := cells.read({"task": "rows", "length": length, "sample": s})) is not None
        ]
        for length in SCALES_AT
    }
    return Observed(accuracy, rows)


def read_calibration(case: Case) -> dict[str, Any]:
    """Return calibration.json of a case."""
    content: dict[str, Any] = json.loads((case.folder / "calibration.json").read_text(encoding="utf-8"))
    return content
