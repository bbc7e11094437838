"""The verdict: every policy on text and prompts that were used for nothing else, at the target length, paired.

All policies read the same sequences. The part of a sequence that is read with β = 1 is computed once: up to the trained
length for policies with β = 1 there or, with `acting_rows`, everything but the last rows. The latter saves most of the
time of long sequences; the keys and values of the prefix are then those of β = 1 for every policy.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from attnscale.errors import AttnScaleWarning
from attnscale.lab.calibration.reading import Prefix, bin_edges, score, summary
from attnscale.lab.calibration.reading import Sequence as Tokens
from attnscale.lab.inputs import Law, Text
from attnscale.lab.results import CONSTANT, Cells, Samples, summarise
from attnscale.lab.tasks import ACCURACY, BITS, Key, Metric
from attnscale.policies import Policy
from attnscale.policies.base import LengthPolicy, reads_scores

ANSWER_NATS = Metric("nats_per_answer_token", "nats_per_answer_token", False, "nats per answer token, lower is better")

Report = Callable[[str], None]
Outcome = Literal["helped", "did not help", "harmed"]


class Trial(NamedTuple):
    """One sequence: its kind, its key, and a function that builds it."""

    kind: str
    key: Key
    build: Callable[[], Tokens]


@dataclass(frozen=True)
class HeldOut:
    """What to read.

    Attributes:
        trials: the sequences.
        laws: the policies; `constant` is one of them.
        layers: layers that get a policy, as in `attnscale.hf.apply`.
        on_existing: as in `attnscale.hf.apply`.
        trained: the trained length.
        chunk: tokens per forward pass.
        acting_rows: the policies act on so many rows at the end; None for all rows.
    """

    trials: Sequence[Trial]
    laws: Sequence[Law]
    layers: str
    on_existing: Literal["raise", "compose", "replace"]
    trained: int
    chunk: int
    acting_rows: int | None = None


def read_held_out(
    model: nn.Module, given: HeldOut, text: Text, cells: Cells, shared: Key, report: Report
) -> list[dict[str, Any]]:
    """Compute the missing cells and return all of them, as {"kind", "policy", "number", ...}."""
    found = []
    for trial in given.trials:
        keys = {law.label: {**trial.key, **shared, "policy": law.policy} for law in given.laws}
        sequence: Tokens | None = None
        prefix: Prefix | None = None
        for law in given.laws:
            stored = cells.read(keys[law.label])
            if stored is None:
                sequence = trial.build() if sequence is None else sequence
                report(f"{trial.kind} {trial.key['sample'] + 1}, {law.label}")
                started = time.perf_counter()
                with torch.inference_mode():
                    result, prefix = _read(model, given, law, sequence, text, prefix)
                cells.write(keys[law.label], result=result, seconds=time.perf_counter() - started)
                stored = cells.read(keys[law.label]) or {}
            found.append({"kind": trial.kind, "policy": law.label, **stored})
    return found


def _read(
    model: nn.Module, given: HeldOut, law: Law, sequence: Tokens, text: Text, prefix: Prefix | None
) -> tuple[dict[str, Any], Prefix | None]:
    """Return the result of one policy, and the shared prefix."""
    length = len(sequence.tokens)
    shared = given.trained if given.acting_rows is None else max(0, length - given.acting_rows)
    with _applied(model, given, law.policy) as handle:
        same = given.acting_rows is not None or all(_is_one_up_to(p, shared) for p in handle.policies.values())
    if same and 0 < shared < length and prefix is None:
        with _applied(model, given, {"name": "constant"}):
            prefix = score(model, sequence, given.chunk, stop=shared)
    with _applied(model, given, law.policy):
        found = score(model, sequence, given.chunk, prefix=prefix if same else None)
    return summary(sequence, found, text, bin_edges(given.trained, length)), prefix


@contextmanager
def _applied(model: nn.Module, given: HeldOut, policy: Any) -> Iterator[Any]:
    import attnscale.hf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttnScaleWarning)  # whether a policy harms the model is measured here
        handle = attnscale.hf.apply(model, policy, layers=given.layers, on_existing=given.on_existing)
    with handle:
        yield handle


def _is_one_up_to(policy: Policy, length: int) -> bool:
    """Whether β = 1 for every row up to a length."""
    if policy.needs_query or reads_scores(policy) or not isinstance(policy, LengthPolicy):
        return False
    with torch.no_grad():
        return bool((policy(torch.arange(1, length + 1, device="cpu")) == 1).all())


def tabulate(read: Sequence[Mapping[str, Any]], model: str, length: int, trained: int) -> list[dict[str, Any]]:
    """Return the rows of held_out.csv: values, and paired differences and ratios to `constant`, with intervals.

    Bits per byte cover the text beyond the trained length; their bins also the text before it.
    """
    groups: dict[tuple[Any, ...], dict[str, list[tuple[float, float]]]] = {}
    for cell in read:
        policy, result = cell["policy"], cell["result"]
        kind = "needles" if result["correct"] else "text"

        def add(metric: Metric, part: str, top: float, bottom: float, kind: str = kind, policy: str = policy) -> None:
            groups.setdefault((kind, metric.name, length, part), {}).setdefault(policy, []).append((top, bottom))

        if result["correct"]:
            add(ACCURACY, "", sum(result["correct"]), len(result["correct"]))
            add(ANSWER_NATS, "", math.fsum(result["answer_nats"]), sum(result["answer_tokens"]))
        beyond = [one for one in result["bins"] if one["start"] >= min(trained, length // 2)]
        for name, bins in [("", beyond), *((f"{one['start']}-{one['stop']}", [one]) for one in result["bins"])]:
            size = sum(one["bytes"] for one in bins)
            if size:
                add(BITS, name, math.fsum(one["nats"] for one in bins) / math.log(2), size)
    samples: dict[tuple[Any, ...], dict[str, Samples]] = {}
    for group, policies in groups.items():
        whole = max(map(len, policies.values()))
        ordered = sorted(policies, key=lambda policy: policy != CONSTANT)  # differences need the baseline first
        samples[group] = {
            policy: {model: torch.tensor(policies[policy], dtype=torch.float64, device="cpu").unbind(1)}
            for policy in ordered
            if len(policies[policy]) == whole
        }
    return summarise(samples)


class Verdict(NamedTuple):
    """Whether a plan helped, and why."""

    outcome: Outcome
    sentences: list[str]


def judge_plan(rows: Sequence[Mapping[str, Any]], plan: str) -> Verdict:
    """Compare a plan with β = 1 on held-out data.

    It helped if the 95 % interval of a paired difference lies on the better side of zero for the answers, or for bits
    per byte where the answers are not significantly worse. It harmed if the answers, or without questions the bits,
    are significantly worse.
    """
    own = {
        (row["task"], row["metric"]): row
        for row in rows
        if row["policy"] == plan and not row["bin"] and "difference" in row
    }
    answers = own.get(("needles", ACCURACY.name))
    nats = own.get(("needles", ANSWER_NATS.name))
    prose = own.get(("text", BITS.name)) or own.get(("needles", BITS.name))
    sentences = []
    for row, metric in ((answers, ACCURACY), (nats, ANSWER_NATS), (prose, BITS)):
        if row is not None:
            sentences.append(_sentence(row, metric, plan))
    right = max((_sign(row, metric) for row, metric in ((answers, ACCURACY), (nats, ANSWER_NATS)) if row), default=0)
    wrong = min((_sign(row, metric) for row, metric in ((answers, ACCURACY), (nats, ANSWER_NATS)) if row), default=0)
    text = _sign(prose, BITS) if prose is not None else 0
    if answers is not None and _sign(answers, ACCURACY) != 0:
        outcome: Outcome = "helped" if _sign(answers, ACCURACY) > 0 else "harmed"
    elif wrong < 0 or (text < 0 and right <= 0):
        outcome = "harmed"
    else:
        outcome = "helped" if right > 0 or text > 0 else "did not help"
    return Verdict(outcome, [f"{plan} {outcome}.", *sentences])


def _sign(row: Mapping[str, Any], metric: Metric) -> int:
    """Return 1 for a significant improvement over β = 1, −1 for a significant loss, else 0."""
    better = 1 if metric.higher_is_better else -1
    return better if row["difference_low"] > 0 else -better if row["difference_high"] < 0 else 0


def _sentence(row: Mapping[str, Any], metric: Metric, plan: str) -> str:
    scale, unit = (100, " %") if metric is ACCURACY else (1, "")
    name = metric.name.replace("_", " ")
    value, base = scale * row["value"], scale * (row["value"] - row["difference"])
    ends = f"{scale * row['difference_low']:+.3g} to {scale * row['difference_high']:+.3g}"
    return (
        f"{name}: {value:.4g}{unit} under {plan}, {base:.4g}{unit} under β = 1 "
        f"(difference {scale * row['difference']:+.3g}, 95 % interval {ends}, {row['samples']} sequences)."
    )
