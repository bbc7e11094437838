"""`attnscale calibrate`: measure a model, predict where it fails, fit the temperature it needs, and test it.

The text is split: one part to measure Λ, one to fit, one to stop the fit, and one that is used for the verdict only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from attnscale import __version__
from attnscale._util.files import write_table, write_yaml
from attnscale.errors import ArgumentError, reject
from attnscale.lab.calibration.description import SCALE_COLUMNS, scale_rows, write_description
from attnscale.lab.calibration.fit import FitOptions, FittedPower, Round, fit, plain_round, read_round
from attnscale.lab.calibration.heads import COLUMNS, Head, judge
from attnscale.lab.calibration.held_out import HeldOut, Trial, judge_plan, read_held_out, tabulate
from attnscale.lab.calibration.measuring import Measured, Place, collect, grid, measure_prompt, measure_text
from attnscale.lab.calibration.options import Calibration
from attnscale.lab.calibration.plans import calibrated_exponents, power_plan, table_plan
from attnscale.lab.calibration.reading import Needles, Sequence, part_of, prompt, window
from attnscale.lab.inputs import EMBEDDED, Law, ModelFolder, Text, read_law
from attnscale.lab.results import RESULT_COLUMNS, Cells
from attnscale.lab.tasks import Key

Progress = Callable[[int, int, str], None]
Build = Callable[[], Sequence]

# Ends of the parts of the text; the last part is for the verdict only, and absent if another file is given for it.
PARTS = {"measure": (0.0, 0.25), "fit": (0.25, 0.45), "validation": (0.45, 0.6), "held_out": (0.6, 1.0)}

# Λ is measured up to this multiple of the trained length.
MEASURED_UP_TO = 4

CALIBRATED, FITTED = "calibrated", "fitted"


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
    write_table(output / "scales.csv", SCALE_COLUMNS, list(scale_rows(heads)))
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
    write_description(output, options, setting.folder, setting.trained, heads, rounds, plans, chosen, verdicts)
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
    shared = setting.shared if options.acting_rows is None else setting.shared | {"acting_rows": options.acting_rows}
    given_to = (options.layers, options.on_existing, setting.trained, options.chunk, options.acting_rows)
    held_out = HeldOut(list(_trials(setting)), laws, *given_to)
    read = read_held_out(model, held_out, setting.texts["held_out"], setting.cells, shared, setting.progress)
    return tabulate(read, setting.folder.name, options.to, setting.trained)
