"""Reads the output folder of `attnscale evaluate`: results, statistics of heads, cost and options."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from attnscale.errors import ArgumentError, reject
from attnscale.lab.results import CONSTANT, INTERVAL
from attnscale.lab.tasks import ACCURACY, TASKS, Perplexity

RESULTS, STATISTICS, COST, RUN = "results.csv", "statistics.csv", "cost.csv", "run.json"
PROSE = Perplexity.name
ARGMAX, ALL = "argmax", "all"
NOTHING = 0.02  # accuracies up to this count as none: no head retrieves, and no policy is the best


class ResultRow(NamedTuple):
    """A row of results.csv; None replaces missing and non-finite numbers. Rows without a value are skipped."""

    task: str
    metric: str
    model: str
    policy: str
    length: int
    bin: str
    value: float
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None

    @property
    def standard_error(self) -> float | None:
        return None if self.low is None or self.high is None else (self.high - self.low) / INTERVAL


class HeadRow(NamedTuple):
    """A row of statistics.csv: medians over the rows of one head."""

    task: str
    model: str
    policy: str
    length: int
    layer: str
    head: int
    beta: float | None
    visible: float | None
    w_max: float | None
    entropy: float | None
    accumulation_8: float | None
    accumulation_8_without_first: float | None
    criticality: float | None


class CostRow(NamedTuple):
    """A row of cost.csv."""

    policy: str
    length: int
    seconds: float | None
    peak_mb: float | None


Row = TypeVar("Row", ResultRow, HeadRow, CostRow)


@dataclass(frozen=True)
class EvaluationData:
    """The content of an evaluation folder, in file order. Only results.csv is required.

    Attributes:
        path: the folder.
        results: rows of results.csv.
        statistics: rows of statistics.csv.
        cost: rows of cost.csv.
        run: content of run.json.

    Example:
        >>> row = ResultRow("recall", "accuracy", "mine", "constant", 128, "", 0.5, None, None, None, None, None)
        >>> data = EvaluationData(Path("."), [row], [], [], {})
        >>> data.policies, data.lengths
        (['constant'], [128])
    """

    path: Path
    results: list[ResultRow]
    statistics: list[HeadRow]
    cost: list[CostRow]
    run: Mapping[str, Any]

    @cached_property
    def policies(self) -> list[str]:
        """Policies: `constant` first, then in file order."""
        found = dict.fromkeys(row.policy for row in self.results)
        return sorted(found, key=lambda policy: policy != CONSTANT)

    @cached_property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.results})

    @cached_property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.results if row.model != ALL))

    @cached_property
    def shown_model(self) -> str:
        """The model shown in charts: "all" (mean over models) if present, else the first model."""
        return ALL if any(row.model == ALL for row in self.results) else self.models[0]

    @cached_property
    def tasks(self) -> list[str]:
        """Measured tasks: retrieval first, perplexity last."""
        measured = {(row.task, row.metric) for row in self.results}
        known = [name for name, task in TASKS.items() if (name, task.metrics[0].name) in measured]
        return sorted(known, key=lambda name: name == PROSE)

    @cached_property
    def retrieval_tasks(self) -> list[str]:
        """Tasks scored by accuracy; the verdict uses the first."""
        return [task for task in self.tasks if TASKS[task].metrics[0] == ACCURACY]

    @cached_property
    def trained_length(self) -> int | None:
        """The longest trained length of the models, or None if run.json has none."""
        models = self.run.get("models")
        known = models.values() if isinstance(models, dict) else ()
        lengths = [model.get("trained_length") for model in known if isinstance(model, dict)]
        return max((length for length in lengths if isinstance(length, int) and 0 < length < 2**53), default=None)

    @cached_property
    def idle(self) -> list[str]:
        """Policies with a floor whose reference length is not exceeded by any length: β = 1 in every row."""
        known = self.run.get("policies")
        found = known.items() if isinstance(known, dict) else ()
        laws = {label: law for label, law in found if isinstance(law, dict) and law.get("floor") is True}
        references = {label: law.get("reference_length") for label, law in laws.items()}
        return [
            policy
            for policy in self.policies
            if isinstance(reference := references.get(policy), int) and self.lengths[-1] <= reference
        ]

    def answers(self, task: str, model: str | None = None) -> dict[int, float]:
        """Return the best accuracy of a retrieval task over policies, by length."""
        found: dict[int, float] = {}
        for (_, length), row in self.whole(task, model).items():
            found[length] = max(found.get(length, 0.0), row.value)
        return found

    @cached_property
    def heads_at(self) -> dict[tuple[str, str, int], list[HeadRow]]:
        """Statistics by task, policy and length."""
        found: dict[tuple[str, str, int], list[HeadRow]] = {}
        for row in self.statistics:
            found.setdefault((row.task, row.policy, row.length), []).append(row)
        return found

    def whole(self, task: str, model: str | None = None) -> dict[tuple[str, int], ResultRow]:
        """Return the metric of a task by policy and length, over all depths or positions."""
        return {(row.policy, row.length): row for row in self._of(task, model) if not row.bin}

    def binned(self, task: str) -> list[ResultRow]:
        """Return the metric of a task by depth or position."""
        return [row for row in self._of(task) if row.bin]

    def _of(self, task: str, model: str | None = None) -> Iterator[ResultRow]:
        wanted = task, TASKS[task].metrics[0].name, model or self.shown_model
        return (row for row in self.results if (row.task, row.metric, row.model) == wanted)


def read_evaluation(folder: str | Path) -> EvaluationData:
    """Read and check the output folder of `attnscale evaluate`. Missing and non-finite numbers become None.

    Args:
        folder: folder with results.csv and, optionally, statistics.csv, cost.csv and run.json.

    Returns:
        The `EvaluationData`.

    Raises:
        ArgumentError: results.csv is missing or has no values, or a file is invalid.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = "recall,accuracy,mine,constant,128,,0.5" + "," * 5
        ...     _ = Path(folder, "results.csv").write_text(",".join(ResultRow._fields) + "\\n" + table)
        ...     data = read_evaluation(folder)
        >>> data.policies, data.lengths
        (['constant'], [128])
    """
    folder = Path(folder)
    if not (folder / RESULTS).is_file():
        reject("path", str(folder), f"an output folder of `attnscale evaluate`, with {RESULTS}")
    results = [row for row in _rows(folder / RESULTS, ResultRow) if not math.isnan(row.value)]
    if not results:
        reject("path", str(folder), f"a folder whose {RESULTS} has at least one row with a value")
    statistics = list(_rows(folder / STATISTICS, HeadRow)) if (folder / STATISTICS).exists() else []
    cost = list(_rows(folder / COST, CostRow)) if (folder / COST).exists() else []
    return EvaluationData(folder, results, statistics, cost, _read_run(folder / RUN))


def _rows(path: Path, kind: type[Row]) -> Iterator[Row]:
    number, hints = 1, get_type_hints(kind)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [repr(name) for name in hints if name not in (reader.fieldnames or hints)]
            if missing:
                accepted = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
                raise ArgumentError(f"path={str(path)!r} is not accepted: expected the {accepted}")
            for number, fields in enumerate(reader, start=2):  # noqa: B007
                if None in fields or None in fields.values():
                    raise ValueError("the number of fields differs from the header")
                yield kind(*(_field(name, fields[name], hint) for name, hint in hints.items()))
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    except ArgumentError:
        raise
    except (ValueError, csv.Error) as error:
        raise ArgumentError(f"line {number} of {path} is not accepted: {error}") from error


def _field(name: str, text: str, hint: object) -> Any:
    if hint is str:
        return text
    text = text.strip()
    if hint is int:
        if not text.isdecimal():
            raise ValueError(f"{name}={text!r}, expected an integer")
        return int(text)
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{name}={text!r}, expected a number or an empty field") from None
    return value if math.isfinite(value) else math.nan if hint is float else None


def _read_run(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        found = json.loads(text)
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        reject(str(path), text.strip(), "a JSON object written by `attnscale evaluate`")
    return found
