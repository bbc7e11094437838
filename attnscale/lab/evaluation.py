"""`attnscale evaluate`: the effect of each policy on a trained model at increasing context lengths."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import nn

from attnscale import __version__
from attnscale._util.files import write_whole
from attnscale.errors import ArgumentError, AttnScaleWarning, reject
from attnscale.lab.cost import Clock, peak_memory
from attnscale.lab.inputs import EMBEDDED, OWN, Law, ModelFolder, Text, read_law
from attnscale.lab.results import Cells, write_tables
from attnscale.lab.sequences import BYTES, NeedleFormat
from attnscale.lab.tasks import TASKS, Key, Task

# Called as progress(done, total, description) before each cell. The description includes an estimate of the rest.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Evaluation:
    """Options of an evaluation. Answers are scored teacher-forced, in one forward pass per sequence.

    Args:
        models: folders of HuggingFace models, or "embedded"; several folders are seeds of one training recipe.
        output: folder for finished cells, tables and page; an interrupted run continues from it.
        policies: names such as log, with parameters (gap_adaptive:r=4), a label (argmax=constant:beta=1e6) or their own
            rotary embedding (log@yarn:2, constant@own), or YAML files of policies or plans. Length laws without
            parameters are anchored at the trained length.
        lengths: sequence lengths in tokens.
        tasks: any of perplexity, needle (one per sequence), multi_needle and recall (multi-query associative recall).
        text: text file for windows and haystacks; at most its first 8 MB are read. The embedded model has its own text.
        trained_length: length at which laws are anchored; default from the config: max_position_embeddings, or
            original_max_position_embeddings of a stretched rotary embedding.
        layers: layers that get the policy, as in attnscale.hf.apply.
        on_existing: for models with built-in length scaling, raise an error, compose the policy with it, or replace it.
        rope: stretched rotary embedding such as yarn:4 or linear:4, without YaRN's own temperature.
        windows: number of text windows for perplexity.
        samples: number of sequences per length for retrieval.
        asked: maximum number of questions per sequence.
        needles_every: tokens per needle in multi_needle; the number of competing needles grows with the length.
        needle: template of a needle, with {key} and {value}.
        question: template of a question, with {key}.
        answer: template of an answer, with {value}.
        alphabet: symbols of keys and values.
        key_symbols: number of symbols in a key.
        value_symbols: number of symbols in a value.
        num_kv_pairs: number of key-value pairs in recall.
        input_seq_len: sequence lengths of recall; default those of the other tasks.
        seed: seed of all sequences.
        chunk: tokens per forward pass; earlier tokens are read from the KV cache.
        dtype: dtype of the weights, float32, bfloat16 or float16.

    Raises:
        ArgumentError: an option is invalid.

    Example:
        >>> evaluation = Evaluation(models=("embedded",), output="runs/mine", lengths=(128, 2048))
        >>> evaluation.tasks
        ('perplexity', 'multi_needle')
    """

    models: tuple[str, ...]
    output: str
    policies: tuple[str, ...] = ("constant", "sqrt_log", "log", "log_squared", "gap_adaptive")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    tasks: tuple[str, ...] = ("perplexity", "multi_needle")
    text: str | None = None
    trained_length: int | None = None
    layers: str = "full"
    on_existing: Literal["raise", "compose", "replace"] = "raise"
    rope: str | None = None
    windows: int = 8
    samples: int = 8
    asked: int = 32
    needles_every: int = 512
    needle: str = NeedleFormat.needle
    question: str = NeedleFormat.question
    answer: str = NeedleFormat.answer
    alphabet: str = NeedleFormat.alphabet
    key_symbols: int = NeedleFormat.key_symbols
    value_symbols: int = NeedleFormat.value_symbols
    num_kv_pairs: int = 64
    input_seq_len: tuple[int, ...] = ()
    seed: int = 0
    chunk: int = 2048
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("models", "policies", "lengths", "tasks"):
            if not getattr(self, name):
                reject(name, getattr(self, name), "at least one")
        for name in ("windows", "samples", "asked", "needles_every", "num_kv_pairs", "chunk", "trained_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                reject(name, getattr(self, name), "a number >= 1")
        for name in ("lengths", "input_seq_len"):
            for length in getattr(self, name):
                if length < 8:
                    reject(name, length, "lengths of 8 tokens or more")
        for task in self.tasks:
            if task not in TASKS:
                reject("tasks", task, ", ".join(TASKS))
        for entry in self.policies:
            read_law(entry, self.trained_length or 2, self.rope)  # raises for mistakes before a model is loaded

    def built_tasks(self) -> list[Task]:
        """Return the tasks with their options."""
        return [TASKS[name].of(self) for name in self.tasks]

    @property
    def style(self) -> NeedleFormat:
        """The format of needles; by default the embedded model uses its own."""
        given = NeedleFormat(
            self.needle, self.question, self.answer, self.alphabet, self.key_symbols, self.value_symbols
        )
        return BYTES if self.models == (EMBEDDED,) and given == NeedleFormat() else given


def demo_evaluation(output: str | Path, quick: bool = False) -> Evaluation:
    """Return the evaluation of `attnscale demo`: the embedded model with five policies.

    Args:
        output: folder for cells, tables and page.
        quick: measure up to 16 instead of 128 times the trained length, with fewer samples.

    Returns:
        The `Evaluation`, for `evaluate`.

    Example:
        >>> demo_evaluation("demo", quick=True).lengths
        (128, 512, 2048)
    """
    return Evaluation(
        models=(EMBEDDED,),
        output=str(output),
        policies=("constant", "sqrt_log", "log", "log_squared", "gap_adaptive=gap_adaptive:r=4"),
        lengths=(128, 512, 2048) if quick else (128, 512, 2048, 8192, 16384),
        windows=2 if quick else 4,
        samples=2 if quick else 4,
        asked=64,
        needles_every=32,
    )


class _Job(NamedTuple):
    """A cell and its inputs."""

    folder: ModelFolder
    law: Law
    text: Text
    task: Task
    key: Key


def evaluate(evaluation: Evaluation, progress: Progress | None = None) -> Path:
    """Compute the missing cells of an evaluation and write its tables.

    Args:
        evaluation: the options.
        progress: called as progress(done, total, description) before each cell.

    Returns:
        The output folder, for `attnscale.report.write_report`.

    Raises:
        ArgumentError: a model, policy, text or length is not accepted, or the output folder is not writable.

    Example:
        >>> import tempfile
        >>> options = {"policies": ("constant", "log"), "lengths": (128,), "tasks": ("needle",), "samples": 1}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     output = evaluate(Evaluation(models=("embedded",), output=folder, **options))
        ...     sorted(path.name for path in output.glob("*.csv"))
        ['cost.csv', 'results.csv', 'statistics.csv']
    """
    output = Path(evaluation.output)
    folders = [ModelFolder.at(given, evaluation.dtype) for given in evaluation.models]
    if len({folder.name for folder in folders}) < len(folders):
        reject("models", evaluation.models, "folders of different names")
    laws = {folder.name: _laws(evaluation, folder) for folder in folders}  # raises for mistakes before any work
    texts = [_read_text(evaluation, folder) for folder in folders]
    jobs = [
        _Job(folder, law, text, task, key | _shared_key(evaluation, folder, law))
        for folder, text in zip(folders, texts, strict=True)
        for law in laws[folder.name]
        for task in evaluation.built_tasks()
        for key in task.cells(text)
    ]
    cells = Cells(output / "cells")
    try:
        _fill(evaluation, cells, jobs, progress)
        write_tables(output, [(job.folder.name, job.law.label, job.key, cells.read(job.key) or {}) for job in jobs])
        _write_description(evaluation, output, folders, laws)
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error
    return output


def _fill(evaluation: Evaluation, cells: Cells, jobs: list[_Job], progress: Progress | None) -> None:
    """Compute the jobs with missing cells: shortest sequences first, so that all policies have results early.

    Every model is first prepared with every policy, and the first sequences are built, so that errors appear at the
    start of a long run. The order does not affect the tables, which follow `jobs`.
    """
    stored = [(job, cells.read(job.key)) for job in jobs]
    missing, clock = [job for job, cell in stored if cell is None], Clock()
    for job, cell in stored:
        if cell is not None and isinstance(cell.get("seconds"), float):
            clock.add(job.key["length"], cell["seconds"])
    done, bench = len(jobs) - len(missing), _Models(evaluation)
    for some in _groups(missing, lambda job: (job.folder.name, job.law.label)):
        with bench.prepared(some[0]):
            for job in some:
                if job.law is missing[0].law:
                    job.task.check(job.key, job.text)
    missing.sort(key=lambda job: job.key["length"])
    for some in _groups(missing, lambda job: (job.key["length"], job.folder.name, job.law.rope, job.law.label)):
        with bench.prepared(some[0]) as model:
            for job in some:
                if progress is not None:
                    rest = clock.rest(other.key["length"] for other in missing[len(missing) - (len(jobs) - done) :])
                    place = f"{job.folder.name}, {job.law.label}, {job.key['length']} tokens"
                    progress(done, len(jobs), f"{place}{rest and f', {rest}'}")
                started = time.perf_counter()
                with peak_memory() as peak:
                    result = job.task.compute(model, job.key, job.text)
                seconds = time.perf_counter() - started
                cells.write(job.key, result=result, seconds=seconds, peak_mb=peak())
                clock.add(job.key["length"], seconds)
                done += 1
    if progress is not None:
        progress(done, len(jobs), "writing tables")


def _groups(jobs: Sequence[_Job], key: Callable[[_Job], Hashable]) -> list[list[_Job]]:
    """Return jobs grouped by a key, in the order of the first of each group."""
    found: dict[Hashable, list[_Job]] = {}
    for job in jobs:
        found.setdefault(key(job), []).append(job)
    return list(found.values())


def _read_text(evaluation: Evaluation, folder: ModelFolder) -> Text:
    needed = any(TASKS[name].needs_text for name in evaluation.tasks)
    if evaluation.text is None and folder.name != EMBEDDED and needed:
        reject("text", None, "a text file; only the embedded model has its own")
    return Text.read(evaluation.text, folder.tokenizer())


def _trained_length(evaluation: Evaluation, folder: ModelFolder) -> int:
    trained = evaluation.trained_length or folder.trained_length
    if trained is None:
        reject("trained_length", None, f"an int, since the config of {folder.name} has no max_position_embeddings")
    return trained


def _laws(evaluation: Evaluation, folder: ModelFolder) -> list[Law]:
    from attnscale.hf.plan import read_plan

    trained = _trained_length(evaluation, folder)
    laws = [read_law(entry, trained, evaluation.rope) for entry in evaluation.policies]
    if len({law.label for law in laws}) < len(laws):
        reject("policies", evaluation.policies, "entries with different labels (label=name:key=value)")
    for law in laws:
        if law.policy != {"name": OWN}:
            read_plan(law.policy)  # a YAML file may contain a plan, which only `hf` can read
    return laws


def _shared_key(evaluation: Evaluation, folder: ModelFolder, law: Law) -> Key:
    """Return the part of a cell's key that is independent of the task."""
    key: Key = {"model": folder.fingerprint, "rope": law.rope, "dtype": folder.dtype, "layers": evaluation.layers}
    key |= {"policy": law.policy, "chunk": evaluation.chunk, "version": __version__}
    return key if evaluation.on_existing == "raise" else key | {"on_existing": evaluation.on_existing}


class _Models:
    """Prepares the models of an evaluation. The last loaded model is kept: policies come off without a trace."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._loaded: tuple[tuple[str, str | None, bool], nn.Module] | None = None

    @contextmanager
    def prepared(self, job: _Job) -> Iterator[nn.Module]:
        """Yield the model of a job with its policy applied."""
        import attnscale.hf

        evaluation, law, model = self._evaluation, job.law, self._load(job)
        if law.policy == {"name": OWN}:
            yield model
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttnScaleWarning)  # the evaluation measures what they warn of
            with attnscale.hf.apply(model, law.policy, layers=evaluation.layers, on_existing=evaluation.on_existing):
                yield model

    def _load(self, job: _Job) -> nn.Module:
        own = job.law.policy == {"name": OWN}
        wanted = job.folder.name, job.law.rope, own
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None  # at most one model in memory
            trained = _trained_length(self._evaluation, job.folder)
            model = job.folder.load_with_policy() if own else job.folder.load(job.law.rope, trained)
            longest = max(length for task in self._evaluation.built_tasks() for length in task.lengths)
            job.folder.refuse_too_long(model, longest)
            self._loaded = wanted, model
        return self._loaded[1]


def _write_description(
    evaluation: Evaluation, output: Path, folders: list[ModelFolder], laws: dict[str, list[Law]]
) -> None:
    """Write run.json: options, models and policies of the run."""
    content = {
        "attnscale": __version__,
        "command": _command(evaluation),
        "spec": dataclasses.asdict(evaluation) | dataclasses.asdict(evaluation.style),
        "models": {
            folder.name: {
                "fingerprint": folder.fingerprint,
                "trained_length": _trained_length(evaluation, folder),
            }
            for folder in folders
        },
        "policies": {
            law.label: law.policy | ({} if law.rope is None else {"rope": law.rope}) for law in laws[folders[0].name]
        },
    }
    write_whole(output / "run.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _command(evaluation: Evaluation) -> str:
    """Return the equivalent command line."""
    words = ["attnscale", "evaluate", *evaluation.models]
    for field in dataclasses.fields(evaluation):
        value = getattr(evaluation, field.name)
        if field.name != "models" and value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{field.name.replace('_', '-')}", text]
    return shlex.join(words)
