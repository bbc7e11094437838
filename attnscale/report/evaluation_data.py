"""Reads the folder that `attnscale evaluate` leaves: results, statistics of heads, cost, and how it was run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attnscale.errors import ArgumentError, reject

RESULTS, STATISTICS, COST, RUN = "results.csv", "statistics.csv", "cost.csv", "run.json"
RETRIEVAL = ("multi_needle", "needle", "recall")  # the first that was measured is the one of the verdict
PERPLEXITY = "perplexity"
BITS = "bits_per_byte"
CONSTANT, ARGMAX, ALL = "constant", "argmax", "all"
QUANTITIES = ("beta", "visible", "w_max", "entropy", "accumulation_8", "criticality")  # of those in statistics.csv

Row = TypeVar("Row")


class Result(NamedTuple):
    """A row of results.csv; None where the file has no number."""

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


class HeadStatistics(NamedTuple):
    """A row of statistics.csv: medians over the rows of one head."""

    task: str
    model: str
    policy: str
    length: int
    layer: str
    head: int
    values: Mapping[str, float]  # only those that are there


class Cost(NamedTuple):
    """A row of cost.csv."""

    policy: str
    length: int
    seconds: float | None
    peak_mb: float | None


@dataclass(frozen=True)
class EvaluationData:
    """The content of a folder. Lists are in the order of the files; only results.csv must exist."""

    path: Path
    results: list[Result]
    statistics: list[HeadStatistics]
    cost: list[Cost]
    run: Mapping[str, Any]

    @property
    def policies(self) -> list[str]:
        """`constant` first, then in the order of the file."""
        found = dict.fromkeys(row.policy for row in self.results)
        return sorted(found, key=lambda policy: policy != CONSTANT)

    @property
    def lengths(self) -> list[int]:
        return sorted({row.length for row in self.results})

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row.model for row in self.results if row.model != ALL))

    @property
    def shown_model(self) -> str:
        """Whose numbers are shown: the mean over models if the file has it, else the first model."""
        return ALL if any(row.model == ALL for row in self.results) else self.models[0]

    @property
    def retrieval_tasks(self) -> list[str]:
        measured = {row.task for row in self.results if row.metric == "accuracy"}
        return [task for task in RETRIEVAL if task in measured]

    @property
    def trained_length(self) -> int | None:
        """The longest of its models, None if run.json does not say."""
        known = [model.get("trained_length") for model in _mappings(self.run.get("models"))]
        return max((length for length in known if isinstance(length, int) and length > 0), default=None)

    @cached_property
    def heads_at(self) -> dict[tuple[str, str, int], list[HeadStatistics]]:
        """Statistics by task, policy and length."""
        found: dict[tuple[str, str, int], list[HeadStatistics]] = {}
        for row in self.statistics:
            found.setdefault((row.task, row.policy, row.length), []).append(row)
        return found

    def whole(self, task: str, metric: str, model: str | None = None) -> dict[tuple[str, int], Result]:
        """By policy and length, the rows that are over all depths or positions."""
        return {
            (row.policy, row.length): row
            for row in self.results
            if (row.task, row.metric, row.model, row.bin) == (task, metric, model or self.shown_model, "")
        }

    def binned(self, task: str, metric: str) -> list[Result]:
        """The rows by depth or position."""
        wanted = (task, metric, self.shown_model)
        return [row for row in self.results if row.bin and (row.task, row.metric, row.model) == wanted]


def read_evaluation(folder: str | Path) -> EvaluationData:
    """Read and check a folder; a number that is missing or not finite becomes None, a broken file is an error."""
    folder = Path(folder)
    if not (folder / RESULTS).is_file():
        reject("path", str(folder), f"a folder that `attnscale evaluate` has written, with {RESULTS} in it")
    results = [row for row in _rows(folder / RESULTS, _result) if row is not None]
    if not results:
        reject("path", str(folder), f"a folder whose {RESULTS} has at least one row with a value")
    statistics = list(_rows(folder / STATISTICS, _statistics)) if (folder / STATISTICS).exists() else []
    cost = list(_rows(folder / COST, _cost)) if (folder / COST).exists() else []
    return EvaluationData(folder, results, statistics, cost, _run(folder / RUN))


def _rows(path: Path, make: Callable[[dict[str, str]], Row]) -> Iterator[Row]:
    number = 1
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, fields in enumerate(csv.DictReader(file, strict=True), start=2):  # noqa: B007
                if None in fields or None in fields.values():
                    raise ValueError("it has not as many fields as the header")
                yield make(fields)
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise ArgumentError(f"path={str(path)!r} is not accepted: expected a column {error.args[0]!r}") from error
    except (ValueError, csv.Error) as error:
        raise ArgumentError(f"line {number} of {path} is not accepted: {error}") from error


def _result(fields: dict[str, str]) -> Result | None:
    value = _number(fields, "value")
    row = Result(
        fields["task"],
        fields["metric"],
        fields["model"],
        fields["policy"],
        _integer(fields, "length"),
        fields["bin"],
        math.nan if value is None else value,
        _number(fields, "low"),
        _number(fields, "high"),
        _number(fields, "difference"),
        _number(fields, "difference_low"),
        _number(fields, "difference_high"),
    )
    return None if value is None else row


def _statistics(fields: dict[str, str]) -> HeadStatistics:
    found = {name: _number(fields, name) for name in QUANTITIES}
    return HeadStatistics(
        fields["task"],
        fields["model"],
        fields["policy"],
        _integer(fields, "length"),
        fields["layer"],
        _integer(fields, "head"),
        {name: value for name, value in found.items() if value is not None},
    )


def _cost(fields: dict[str, str]) -> Cost:
    return Cost(fields["policy"], _integer(fields, "length"), _number(fields, "seconds"), _number(fields, "peak_mb"))


def _number(fields: dict[str, str], name: str) -> float | None:
    text = fields[name].strip()
    try:
        value = float(text) if text else math.nan
    except ValueError:
        raise ValueError(f"{name}={text!r}, expected a number or an empty field") from None
    return value if math.isfinite(value) else None


def _integer(fields: dict[str, str], name: str) -> int:
    text = fields[name].strip()
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r}, expected a whole number")
    return int(text)


def _run(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"path={str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} is not accepted: expected an object, not {type(found).__name__}")
    return found


def _mappings(found: object) -> list[Mapping[str, Any]]:
    return [value for value in found.values() if isinstance(value, dict)] if isinstance(found, dict) else []
