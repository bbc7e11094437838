"""The options of a calibration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from attnscale.errors import reject
from attnscale.lab.inputs import EMBEDDED, read_law
from attnscale.lab.sequences import BYTES, NeedleFormat

TASKS = ("perplexity", "multi_needle")


@dataclass(frozen=True)
class Calibration:
    """Options of a calibration.

    Args:
        model: folder of a HuggingFace model, or "embedded".
        to: the length in tokens at which the model will be used, longer than the trained length.
        output: folder for finished cells, tables, plans and page; an interrupted run continues from it.
        text: text file; at most its first 8 MB are read. The embedded model has its own text.
        held_out: another text file for the verdict; default the last two fifths of the text.
        tasks: perplexity (windows of the text), multi_needle (many needles hidden in the text), or both.
        policies: policies compared with the plans in the verdict, as in attnscale evaluate; default constant, log,
            log_squared and YaRN's factor for this length.
        fit: learn one exponent per head from the model's own loss.
        trained_length: length at which laws are anchored; default from the config.
        layers: layers that get a policy, as in attnscale.hf.apply.
        on_existing: for models with built-in length scaling, raise an error, compose the policy with it, or replace it.
        rope: stretched rotary embedding such as yarn:4, without YaRN's own temperature.
        lengths: lengths at which Λ is measured, three or more; default a geometric grid from the trained length to 4
            times it, at most to the target length.
        samples: number of prompts per measured length; fewer than 64 give wide intervals.
        windows: number of text windows for measuring.
        asked: maximum number of questions per prompt.
        needles: number of needles in a prompt of the trained length.
        needle_growth: the number of needles grows with the length to this power; 1 keeps their density.
        needle: template of a needle, with {key} and {value}.
        question: template of a question, with {key}.
        answer: template of an answer, with {value}.
        alphabet: symbols of keys and values.
        key_symbols: number of symbols in a key.
        value_symbols: number of symbols in a value.
        fit_length: length of the sequences of the fit; default the target length.
        fit_sequences: number of sequences per task for the fit.
        fit_rounds: rounds of the fit, at most; the prefixes are computed again in each.
        fit_steps: gradient steps per round.
        fit_rows: rows with gradients at the end of a text.
        learning_rate: about the largest change of an exponent per step.
        strength: factor of the L2 term that pulls the exponents to 0.
        tests: number of held-out prompts, and of windows unless test_windows is given.
        test_windows: number of held-out windows; with 0, bits per byte are those of the text around the needles.
        acting_rows: in the verdict, let the policies act on so many rows at the end of a sequence only, which takes a
            fraction of the time; the keys of earlier rows are then those of β = 1. Default: all rows.
        seed: seed of all sequences.
        chunk: tokens per forward pass.
        dtype: dtype of the weights, float32, bfloat16 or float16.

    Raises:
        ArgumentError: an option is invalid.

    Example:
        >>> Calibration(model="embedded", to=4096, output="runs/mine").tasks
        ('perplexity', 'multi_needle')
    """

    model: str
    to: int
    output: str
    text: str | None = None
    held_out: str | None = None
    tasks: tuple[str, ...] = TASKS
    policies: tuple[str, ...] = ()
    fit: bool = False
    trained_length: int | None = None
    layers: str = "full"
    on_existing: Literal["raise", "compose", "replace"] = "raise"
    rope: str | None = None
    lengths: tuple[int, ...] = ()
    samples: int = 64
    windows: int = 8
    asked: int = 32
    needles: int = 8
    needle_growth: float = 1.0
    needle: str = NeedleFormat.needle
    question: str = NeedleFormat.question
    answer: str = NeedleFormat.answer
    alphabet: str = NeedleFormat.alphabet
    key_symbols: int = NeedleFormat.key_symbols
    value_symbols: int = NeedleFormat.value_symbols
    fit_length: int | None = None
    fit_sequences: int = 8
    fit_rounds: int = 4
    fit_steps: int = 8
    fit_rows: int = 512
    learning_rate: float = 0.03
    strength: float = 0.001
    tests: int = 8
    test_windows: int | None = None
    acting_rows: int | None = None
    seed: int = 0
    chunk: int = 2048
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                reject("tasks", task, ", ".join(TASKS))
        if not self.tasks:
            reject("tasks", self.tasks, f"at least one of {', '.join(TASKS)}")
        least = {"to": 16, "samples": 2, "windows": 2, "tests": 2}
        ones = (
            "asked",
            "needles",
            "fit_sequences",
            "fit_rounds",
            "fit_steps",
            "fit_rows",
            "chunk",
            "trained_length",
            "fit_length",
            "acting_rows",
        )
        for name, bound in (least | dict.fromkeys(ones, 1)).items():
            value = getattr(self, name)
            if value is not None and value < bound:
                reject(name, value, f"an int >= {bound}")
        if self.test_windows is not None and (self.test_windows < 0 or (not self.test_windows and len(self.tasks) < 2)):
            reject("test_windows", self.test_windows, f"an int >= 0; 0 only with the tasks {', '.join(TASKS)}")
        for name in ("learning_rate", "strength", "needle_growth"):
            if not 0 <= getattr(self, name) < math.inf or (name == "learning_rate" and not self.learning_rate):
                reject(name, getattr(self, name), f"a number {'> 0' if name == 'learning_rate' else '>= 0'}")
        for entry in self.policies:
            read_law(entry, self.trained_length or 2, self.rope)
        if self.lengths and (len(set(self.lengths)) < 3 or min(self.lengths) < 16):
            reject("lengths", self.lengths, "three or more different lengths of 16 tokens or more")

    @property
    def style(self) -> NeedleFormat:
        """The format of needles; by default the embedded model uses its own."""
        given = NeedleFormat(
            self.needle, self.question, self.answer, self.alphabet, self.key_symbols, self.value_symbols
        )
        return BYTES if self.model == EMBEDDED and given == NeedleFormat() else given
