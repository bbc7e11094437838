"""`attnscale calibrate`: measure a model, predict where it fails, fit the temperature it needs, and test it.

The text is split: one part to measure Λ, one to fit, one to stop the fit, and one that is used for the verdict only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from attnscale import __version__
from attnscale._util.files import write_table, write_whole, write_yaml
from attnscale.errors import ArgumentError, reject
from attnscale.lab.calibration.fit import FitOptions, FittedPower, Round, fit, plain_round, read_round
from attnscale.lab.calibration.heads import COLUMNS, RETRIEVES, Head, judge
from attnscale.lab.calibration.held_out import HeldOut, Trial, Verdict, judge_plan, read_held_out, tabulate
from attnscale.lab.calibration.measuring import Measured, Place, collect, grid, measure_prompt, measure_text
from attnscale.lab.calibration.plans import calibrated_exponents, power_plan, table_plan
from attnscale.lab.calibration.reading import Needles, Sequence, part_of, prompt, window
from attnscale.lab.inputs import EMBEDDED, Law, ModelFolder, Text, read_law
from attnscale.lab.results import RESULT_COLUMNS, Cells
from attnscale.lab.sequences import BYTES, NeedleFormat
from attnscale.lab.tasks import Key

Progress = Callable[[int, int, str], None]
Build = Callable[[], Sequence]

TASKS = ("perplexity", "multi_needle")

# Ends of the parts of the text; the last part is for the verdict only, and absent if another file is given for it.
PARTS = {"measure": (0.0, 0.25), "fit": (0.25, 0.45), "validation": (0.45, 0.6), "held_out": (0.6, 1.0)}

# Λ is measured up to this multiple of the trained length.
MEASURED_UP_TO = 4

CALIBRATED, FITTED = "calibrated", "fitted"


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
    needles: int = 16
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


class _Setting(NamedTuple):
    """The inputs of a calibration."""

    options: Calibration
    folder: ModelFolder
    trained: int
    texts: dict[str, Text]
    lengths: tuple[int, ...]
    needles: Needles
    cells: Cells
    shared: Key
    progress: Callable[[str], None]


def calibrate(calibration: Calibration, progress: Progress | None = None) -> Path:
    """Measure a model, write the plan it needs, and compare it with other policies on held-out data.

    Args:
        calibration: the options.
        progress: called as progress(done, total, description) before each piece of work.

    Returns:
        The output folder, with heads.csv, scales.csv, policy.yaml, table.yaml, fitted.yaml, held_out.csv and
        calibration.json, whose `helped` is the verdict.

    Raises:
        ArgumentError: an option, the model or the text is not accepted, or the output folder is not writable.
    """
    try:
        return _calibrate(calibration, progress)
    except OSError as error:
        raise ArgumentError(f"output={calibration.output!r} cannot be written: {error.strerror}") from error


def _calibrate(options: Calibration, progress: Progress | None) -> Path:
    setting = _prepare(options, progress)
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    model = setting.folder.load(options.rope, setting.trained)
    setting.folder.refuse_too_long(model, options.to)
    heads = measure(setting, model)
    write_table(output / "heads.csv", COLUMNS, [head.row(options.to) for head in heads])
    write_table(output / "scales.csv", _SCALES, list(_scale_rows(heads)))
    plans: dict[str, dict[str, Any]] = {}
    if any(head.retrieves for head in heads):
        plans[CALIBRATED] = power_plan(calibrated_exponents(heads), setting.trained)
        write_yaml(output / "table.yaml", table_plan(heads, setting.trained, options.to))
    rounds = _fit(setting, model) if options.fit else []
    if rounds and _best(rounds).number > 0:
        plans[FITTED] = power_plan(_best(rounds).exponents, setting.trained)
        write_yaml(output / "fitted.yaml", plans[FITTED])
    elif rounds:
        (output / "fitted.yaml").unlink(missing_ok=True)
    chosen = FITTED if FITTED in plans else CALIBRATED if CALIBRATED in plans else None
    if chosen is not None:
        write_yaml(output / "policy.yaml", plans[chosen])
    rows = _test(setting, model, plans)
    write_table(output / "held_out.csv", RESULT_COLUMNS, rows)
    verdicts = {name: judge_plan(rows, name) for name in plans}
    _describe(setting, heads, rounds, plans, chosen, verdicts, output)
    return output


def _prepare(options: Calibration, progress: Progress | None) -> _Setting:
    """Check all options against the model and the text before any work."""
    folder = ModelFolder.at(options.model, options.dtype)
    trained = options.trained_length or folder.trained_length
    if trained is None:
        reject("trained_length", None, f"an int, since the config of {folder.name} has no max_position_embeddings")
    if options.to <= trained:
        reject("to", options.to, f"a length > {trained}, the trained length")
    if options.text is None and folder.name != EMBEDDED:
        reject("text", None, "a text file; only the embedded model has its own")
    tokenizer = folder.tokenizer()
    whole = Text.read(options.text, tokenizer)
    last = 1.0 if options.held_out is None else PARTS["held_out"][0]
    texts = {name: part_of(whole, start / last, stop / last) for name, (start, stop) in PARTS.items() if start < last}
    if options.held_out is not None:
        texts["held_out"] = Text.read(options.held_out, tokenizer)
    lengths = options.lengths or grid(trained, min(MEASURED_UP_TO * trained, options.to))
    if len(lengths) < 3:
        reject("to", options.to, f"a length >= {2 * trained}, twice the trained length, or at least three `lengths`")
    needles = Needles(options.style, options.needles, options.needle_growth, options.asked)
    shared: Key = {"model": folder.fingerprint, "rope": options.rope, "dtype": folder.dtype, "chunk": options.chunk}
    shared |= {
        "layers": options.layers,
        "on_existing": options.on_existing,
        "version": __version__,
        "seed": options.seed,
    }
    total = _count(options, lengths)
    done = iter(range(total + 1))

    def report(text: str) -> None:
        if progress is not None:
            progress(min(next(done, total), total), total, text)

    setting = _Setting(
        options,
        folder,
        trained,
        texts,
        tuple(sorted(lengths)),
        needles,
        Cells(Path(options.output) / "cells"),
        shared,
        report,
    )
    next(_trials(setting)).build()  # the sequences of each kind are built once, so that errors appear at the start
    if options.fit:
        _fit_sequences(setting)
    for length in (min(lengths), max(lengths)):
        for _, build in _measured_sequences(setting, length, 1):
            build()
    return setting


def _count(options: Calibration, lengths: tuple[int, ...]) -> int:
    """Return the number of pieces of work, for the progress bar; the fit is estimated."""
    measured = options.windows * ("perplexity" in options.tasks)
    measured += len(lengths) * options.samples * ("multi_needle" in options.tasks)
    windows = options.tests if options.test_windows is None else options.test_windows
    windows = windows * ("perplexity" in options.tasks)
    tested = (windows + options.tests * ("multi_needle" in options.tasks)) * (
        len(options.policies or range(4)) + 1 + options.fit
    )
    return (
        measured
        + tested
        + options.fit * options.fit_rounds * (options.fit_steps + len(options.tasks) * options.fit_sequences)
    )


@contextmanager
def _applied(setting: _Setting, model: nn.Module, policy: Any) -> Iterator[Any]:
    import attnscale.hf

    options = setting.options
    with attnscale.hf.apply(model, policy, layers=options.layers, on_existing=options.on_existing) as handle:
        yield handle


def measure(setting: _Setting, model: nn.Module) -> list[Head]:
    """Measure Λ under β = 1 and return the findings on every head."""
    options = setting.options
    found: dict[str, dict[Place, Measured]] = {}
    with _applied(setting, model, "constant"):
        if "perplexity" in options.tasks:
            results = []
            for number in range(options.windows):
                longest = max(setting.lengths)
                key: Key = {"task": "measured_text", "length": longest, "sample": number, "windows": options.windows}
                key |= {"lengths": list(setting.lengths), "text": setting.texts["measure"].digest}
                build = partial(window, setting.texts["measure"], longest, number, options.windows)
                results.append(_cell(setting, key, partial(_measure_text, setting, model, build)))
            found["text"] = collect(results)
        if "multi_needle" in options.tasks:
            results = [
                _cell(setting, key, partial(_measure_prompt, setting, model, build))
                for length in setting.lengths
                for key, build in _measured_sequences(setting, length, options.samples)
            ]
            found["prompts"] = collect(results)
    return judge(found.get("text", {}), found.get("prompts", {}), options.seed)


def _measure_text(setting: _Setting, model: nn.Module, build: Build) -> dict[str, Any]:
    return measure_text(model, build().tokens, setting.lengths, setting.options.chunk)


def _measure_prompt(setting: _Setting, model: nn.Module, build: Build) -> dict[str, Any]:
    return measure_prompt(model, build(), setting.options.chunk)


def _measured_sequences(setting: _Setting, length: int, number: int) -> Iterator[tuple[Key, Build]]:
    if "multi_needle" not in setting.options.tasks:
        return
    for sample in range(number):
        key = _prompt_key(setting, "measured_prompts", "measure", length, sample)
        yield key, _prompt_builder(setting, "measure", length, sample)


def _prompt_key(setting: _Setting, task: str, part: str, length: int, sample: int) -> Key:
    needles = setting.needles
    key: Key = {"task": task, "length": length, "sample": sample, "text": setting.texts[part].digest}
    key |= {"needles": needles.number(length, setting.trained), "asked": needles.asked}
    return key | {"style": dataclasses.asdict(needles.style)}


def _prompt_builder(setting: _Setting, part: str, length: int, sample: int) -> Build:
    seed = (setting.options.seed, part, length, sample)
    return partial(prompt, setting.texts[part], setting.needles, length, setting.trained, *seed)


def _cell(setting: _Setting, key: Key, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    setting.progress(f"{key['task'].replace('_', ' ')}, {key['length']} tokens")
    key = key | setting.shared
    stored = setting.cells.read(key)
    if stored is None:
        setting.cells.write(key, result=compute())
        stored = setting.cells.read(key) or {}
    result: dict[str, Any] = stored["result"]
    return result


def _fit(setting: _Setting, model: nn.Module) -> list[Round]:
    """Fit the exponents, or read the rounds of an interrupted fit."""
    from attnscale.hf.selection import select

    options = setting.options
    length = options.fit_length or options.to
    chosen = select(model, layers=options.layers)
    plan = {
        "layers": {
            str(layer.layer): FittedPower(num_heads=layer.num_heads or 1, reference_length=setting.trained)
            for layer in chosen
        }
    }
    settings = FitOptions(
        options.fit_rounds, options.fit_steps, options.fit_rows, options.learning_rate, options.strength, options.chunk
    )
    sets = _fit_sequences(setting)
    key: Key = {"task": "fit", "length": length, "sample": 0, "options": list(settings), "tasks": list(options.tasks)}
    key |= {"sequences": options.fit_sequences, "text": setting.texts["fit"].digest} | setting.shared
    key |= {
        "needles": setting.needles.number(length, setting.trained),
        "asked": options.asked,
        "trained": setting.trained,
    }

    def recall(number: int) -> Round | None:
        stored = setting.cells.read(key | {"sample": number})
        return None if stored is None else read_round(stored["result"])

    with _applied(setting, model, plan) as handle:
        policies = {path: policy for path, policy in handle.policies.items() if isinstance(policy, FittedPower)}
        return fit(
            model,
            policies,
            sets["fit"],
            sets["validation"],
            settings,
            recall=recall,
            keep=lambda done: setting.cells.write(key | {"sample": done.number}, result=plain_round(done)),
            report=lambda text: setting.progress(f"fit, {text}"),
        )


def _fit_sequences(setting: _Setting) -> dict[str, list[Sequence]]:
    """Return the sequences of the fit, and half as many for validation."""
    options = setting.options
    length = options.fit_length or options.to
    sets = {}
    for part in ("fit", "validation"):
        number = options.fit_sequences if part == "fit" else max(2, options.fit_sequences // 2)
        built = []
        if "perplexity" in options.tasks:
            built += [window(setting.texts[part], length, sample, number) for sample in range(number)]
        if "multi_needle" in options.tasks:
            built += [_prompt_builder(setting, part, length, sample)() for sample in range(number)]
        sets[part] = built
    return sets


def _best(rounds: list[Round]) -> Round:
    return min(rounds, key=lambda one: one.validation)


def _trials(setting: _Setting) -> Iterator[Trial]:
    options, text = setting.options, setting.texts["held_out"]
    windows = 0 if "perplexity" not in options.tasks else options.test_windows
    windows = options.tests if windows is None else windows
    for number in range(windows):
        key: Key = {"task": "held_out_text", "length": options.to, "sample": number, "text": text.digest}
        yield Trial("text", key | {"windows": windows}, partial(window, text, options.to, number, windows))
    for number in range(options.tests if "multi_needle" in options.tasks else 0):
        key = _prompt_key(setting, "held_out_prompts", "held_out", options.to, number)
        yield Trial("prompt", key, _prompt_builder(setting, "held_out", options.to, number))


def _test(setting: _Setting, model: nn.Module, plans: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Read the held-out sequences under every policy and return the rows of held_out.csv."""
    options = setting.options
    laws = [Law(name, plan) for name, plan in plans.items()]
    entries = options.policies or ("log", "log_squared", f"yarn:factor={options.to / setting.trained:g}")
    given = [read_law(entry, setting.trained, options.rope) for entry in entries if entry != "constant"]
    laws = [Law("constant", {"name": "constant"}), *given, *laws]
    held_out = HeldOut(
        list(_trials(setting)), laws, options.layers, options.on_existing, setting.trained, options.chunk
    )
    read = read_held_out(model, held_out, setting.texts["held_out"], setting.cells, setting.shared, setting.progress)
    return tabulate(read, setting.folder.name, options.to, setting.trained)


_SCALES = ("layer", "head", "rows_of", "retrieves", "length", "accumulation", "low", "high")


def _scale_rows(heads: list[Head]) -> Iterator[dict[str, Any]]:
    """Yield the rows of scales.csv: Λ of every head at every length."""
    for head in heads:
        growth = head.growth
        if growth is None:
            continue
        for length, value, low, high in zip(growth.lengths, growth.medians, growth.lows, growth.highs, strict=True):
            row = {"layer": head.place.layer, "head": head.place.head, "rows_of": head.rows_of}
            row |= {"retrieves": int(head.retrieves), "length": length}
            yield row | {"accumulation": value, "low": low, "high": high}


def _curve(setting: _Setting, head: Head) -> Iterator[dict[str, float]]:
    """Yield both forms of Λ and their bracket at doublings from the trained length to the target."""
    if head.growth is None:
        return
    lengths = [setting.trained]
    while lengths[-1] * 2 < setting.options.to:
        lengths.append(lengths[-1] * 2)
    for length in (*lengths, setting.options.to):
        low, high = head.growth.predict(length)
        forms = {name: form.at(length)[0].item() for name, form in head.growth.forms.items()}
        yield {"length": length, **forms, "low": low, "high": high}


def _describe(
    setting: _Setting,
    heads: list[Head],
    rounds: list[Round],
    plans: dict[str, dict[str, Any]],
    chosen: str | None,
    verdicts: dict[str, Verdict],
    output: Path,
) -> None:
    """Write calibration.json."""
    retrieving = [head for head in heads if head.retrieves]
    content = {
        "attnscale": __version__,
        "options": dataclasses.asdict(setting.options) | dataclasses.asdict(setting.options.style),
        "model": {"name": setting.folder.name, "fingerprint": setting.folder.fingerprint},
        "trained_length": setting.trained,
        "lengths": list(setting.lengths),
        "criterion": f"a head retrieves if its mean weight on the answer's needle is at least {RETRIEVES}",
        "retrieving": [
            {
                "layer": head.place.layer,
                "head": head.place.head,
                "weight": head.weight,
                "criticality": head.criticality(),
                "lost_between": [None if math.isinf(end) else end for end in head.lost_between()],
                "exponent": head.exponent(),
                "decided": None if head.growth is None else head.growth.decided,
                "curve": list(_curve(setting, head)),
            }
            for head in retrieving
        ],
        "validation": [one.validation for one in rounds],
        "plans": plans,
        "policy": chosen,
        "helped": chosen is not None and verdicts[chosen].outcome == "helped",
        "verdict": {name: {"outcome": one.outcome, "sentences": one.sentences} for name, one in verdicts.items()},
    }
    write_whole(output / "calibration.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
