"""`attnscale evaluate`: what each temperature law does to a trained model at growing context lengths."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import nn

from attnscale import __version__
from attnscale._util.files import write_whole
from attnscale.errors import ArgumentError, AttnScaleWarning, reject
from attnscale.lab.laws import OWN, Law, read_law
from attnscale.lab.models import EMBEDDED, ModelFolder, Text
from attnscale.lab.needles import BYTES, NeedleFormat, Retrieval, hide_needles
from attnscale.lab.peak_memory import peak_memory
from attnscale.lab.tables import Cells, Key, write_tables
from attnscale.lab.tasks import answer_questions, read_window, recall_sequence, seeded, windows_of

Progress = Callable[[int, int, str], None]

TASKS = ("perplexity", "needle", "multi_needle", "recall")


@dataclass(frozen=True)
class Evaluation:
    """What to measure. Retrieval is scored teacher-forced, in one forward a sequence.

    Args:
        models: folders of HuggingFace models, or "embedded"; several are seeds of one recipe.
        output: folder for finished cells, tables and page; a run that was interrupted goes on from there.
        policies: names such as log, with parameters as gap_adaptive:r=4, with a label as argmax=constant:beta=1e6, with
            a rotary embedding of their own as log@yarn:2 or constant@own, or YAML files of policies or plans. Length
            laws without parameters are anchored at the trained length.
        lengths: of the sequences, in tokens.
        tasks: of perplexity, needle (one in each sequence), multi_needle and recall (multi-query associative recall).
        text: file that windows and haystacks are taken from, of which at most the first 8 MB are read; the embedded
            model has its own.
        trained_length: where laws are anchored; by default max_position_embeddings of the config.
        layers: which layers get the policy, as in attnscale.hf.apply.
        on_existing: where the model scales its logits by length already, raise an error, compose the policy with that,
            or replace it.
        rope: another rotary embedding, such as yarn:4 or linear:4, without a temperature of its own.
        windows: pieces of text for perplexity.
        samples: sequences per length for retrieval.
        asked: questions in each sequence, at the most.
        needles_every: one needle per so many tokens in multi_needle, so that competitors grow with the length.
        needle: how a needle is written, with {key} and {value}.
        question: how it is asked for, with {key}.
        answer: how the value follows, with {value}.
        alphabet: symbols of keys and values.
        key_symbols: symbols of a key.
        value_symbols: symbols of a value.
        num_kv_pairs: pairs of key and value in recall.
        input_seq_len: lengths for recall; by default those of all tasks.
        seed: of all sequences.
        chunk: tokens of one forward; the cache carries the rest.
        dtype: of the weights, float32, bfloat16 or float16.
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
            read_law(entry, self.trained_length or 2, self.rope)  # refuses mistakes before a model is looked at

    def lengths_of(self, task: str) -> tuple[int, ...]:
        """The lengths at which a task is measured."""
        return self.input_seq_len if task == "recall" and self.input_seq_len else self.lengths

    @property
    def longest(self) -> int:
        """Of all sequences."""
        return max(length for task in self.tasks for length in self.lengths_of(task))

    @property
    def style(self) -> NeedleFormat:
        """How needles are written; the embedded model has a format of its own unless another is given."""
        given = NeedleFormat(
            self.needle, self.question, self.answer, self.alphabet, self.key_symbols, self.value_symbols
        )
        return BYTES if self.models == (EMBEDDED,) and given == NeedleFormat() else given


def evaluate(evaluation: Evaluation, progress: Progress | None = None) -> Path:
    """Compute the cells that the output folder lacks, and write its tables; returns the folder."""
    output = Path(evaluation.output)
    folders = [ModelFolder.at(given, evaluation.dtype) for given in evaluation.models]
    if len({folder.name for folder in folders}) < len(folders):
        reject("models", evaluation.models, "folders of different names")
    laws = {folder.name: _laws(evaluation, folder) for folder in folders}  # refuses mistakes, before any work
    texts = [_read_text(evaluation, folder) for folder in folders]
    jobs = [
        _Job(folder, law, text, key)
        for folder, text in zip(folders, texts, strict=True)
        for law in laws[folder.name]
        for key in _keys(evaluation, folder, law, text)
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
    """Compute the jobs whose cells are missing, a model with its policy at a time."""
    missing = [job for job in jobs if cells.read(job.key) is None]
    done = len(jobs) - len(missing)
    runs = list(_runs(missing))
    _refuse_mistakes(evaluation, runs)
    for folder, law, some in runs:
        with _prepared(evaluation, folder, law) as model:
            for job in some:
                if progress is not None:
                    progress(done, len(jobs), f"{folder.name}, {law.label}, {job.key['length']}")
                started = time.perf_counter()
                with peak_memory() as peak:
                    result = _compute(evaluation, model, job)
                cells.write(job.key, result=result, seconds=time.perf_counter() - started, peak_mb=peak())
                done += 1
    if progress is not None:
        progress(done, len(jobs), "writing tables")


def _refuse_mistakes(evaluation: Evaluation, runs: list[_Run]) -> None:
    """Prepare every model with every policy, and build the first sequences: nobody should wait hours for an error."""
    for folder, law, jobs in runs:
        with _prepared(evaluation, folder, law):
            for job in jobs:
                if job.key["task"] != "perplexity" and job.key["sample"] == 0 and law is runs[0][1]:
                    _sequence(evaluation, job)


class _Job(NamedTuple):
    folder: ModelFolder
    law: Law
    text: Text
    key: Key


_Run = tuple[ModelFolder, Law, list[_Job]]


def _read_text(evaluation: Evaluation, folder: ModelFolder) -> Text:
    if evaluation.text is None and folder.name != EMBEDDED and (set(evaluation.tasks) - {"recall"}):
        reject("text", None, "a text file, except for the embedded model")
    return Text.read(evaluation.text, folder.tokenizer())


def _trained_length(evaluation: Evaluation, folder: ModelFolder) -> int:
    trained = evaluation.trained_length or folder.trained_length
    if trained is None:
        reject("trained_length", None, f"a length: the config of {folder.name} has no max_position_embeddings")
    return trained


def _laws(evaluation: Evaluation, folder: ModelFolder) -> list[Law]:
    from attnscale.hf.plan import read_plan

    trained = _trained_length(evaluation, folder)
    laws = [read_law(entry, trained, evaluation.rope) for entry in evaluation.policies]
    if len({law.label for law in laws}) < len(laws):
        reject("policies", evaluation.policies, "entries with different labels (label=name:key=value)")
    for law in laws:
        if law.policy != {"name": OWN}:
            read_plan(law.policy)  # a file may hold a plan, which only `hf` can read
    return laws


def _keys(evaluation: Evaluation, folder: ModelFolder, law: Law, text: Text) -> Iterator[Key]:
    """The cells of a model and a policy, each with everything that decides its result."""
    same: Key = {"model": folder.fingerprint, "rope": law.rope, "dtype": folder.dtype, "layers": evaluation.layers}
    same |= {"policy": law.policy, "chunk": evaluation.chunk, "version": __version__}
    if evaluation.on_existing != "raise":
        same["on_existing"] = evaluation.on_existing
    if "perplexity" in evaluation.tasks:
        longest = max(evaluation.lengths)
        windows_of(text.tokens, longest, evaluation.windows)
        whole = {"text": text.digest, "lengths": sorted(evaluation.lengths), "windows": evaluation.windows}
        for sample in range(evaluation.windows):
            yield {"task": "perplexity", "length": longest, "sample": sample, **whole, **same}
    for task in evaluation.tasks:
        if task == "perplexity":
            continue
        for length in evaluation.lengths_of(task):
            if task == "recall":
                content: Key = {"num_kv_pairs": evaluation.num_kv_pairs}
            else:
                needles = 1 if task == "needle" else max(1, length // evaluation.needles_every)
                content = {"needles": needles, "asked": min(evaluation.asked, needles), "text": text.digest}
                content["style"] = dataclasses.asdict(evaluation.style)
            for sample in range(evaluation.samples):
                yield {
                    "task": task,
                    "length": length,
                    "sample": sample,
                    "seed": evaluation.seed,
                    **content,
                    **same,
                }


def _runs(jobs: list[_Job]) -> Iterator[_Run]:
    """Jobs by model and policy, so that each pair is prepared once."""
    groups: dict[tuple[str, str], list[_Job]] = {}
    for job in jobs:
        groups.setdefault((job.folder.name, job.law.label), []).append(job)
    for some in groups.values():
        yield some[0].folder, some[0].law, some


@contextmanager
def _prepared(evaluation: Evaluation, folder: ModelFolder, law: Law) -> Iterator[nn.Module]:
    """The model with a policy."""
    import attnscale.hf

    if law.policy == {"name": OWN}:
        model = folder.load_with_policy()
        folder.refuse_too_long(model, evaluation.longest)
        yield model
        return
    model = folder.load(law.rope, _trained_length(evaluation, folder))
    folder.refuse_too_long(model, evaluation.longest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttnScaleWarning)  # whether a policy harms the model is what is measured
        with attnscale.hf.apply(model, law.policy, layers=evaluation.layers, on_existing=evaluation.on_existing):
            yield model


def _compute(evaluation: Evaluation, model: nn.Module, job: _Job) -> dict[str, Any]:
    key, text = job.key, job.text
    if key["task"] == "perplexity":
        window = windows_of(text.tokens, key["length"], evaluation.windows)[key["sample"]]
        return read_window(model, window, evaluation.lengths, text.size, evaluation.chunk)
    return answer_questions(model, _sequence(evaluation, job), evaluation.chunk)


def _sequence(evaluation: Evaluation, job: _Job) -> Retrieval:
    """The sequence of a retrieval cell, the same for all policies."""
    key, text = job.key, job.text
    generator = seeded(evaluation.seed, key["task"], key["length"], key["sample"])
    if key["task"] == "recall":
        ordinary = sorted(set(range(len(text.tokenizer))) - set(text.tokenizer.all_special_ids))
        return recall_sequence(key["length"], evaluation.num_kv_pairs, ordinary, generator)
    return hide_needles(
        evaluation.style, text.encode, text.tokens, key["length"], key["needles"], key["asked"], generator
    )


def _write_description(
    evaluation: Evaluation, output: Path, folders: list[ModelFolder], laws: dict[str, list[Law]]
) -> None:
    """run.json: what was asked, of which models, with which policies."""
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
    """The command line that gives the same evaluation."""
    words = ["attnscale", "evaluate", *evaluation.models]
    for field in dataclasses.fields(evaluation):
        value = getattr(evaluation, field.name)
        if field.name != "models" and value != field.default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{field.name.replace('_', '-')}", text]
    return shlex.join(words)
