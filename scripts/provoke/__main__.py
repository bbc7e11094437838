"""Run healthy and provoked trainings under a monitor, and print which events it raised.

make provoke                                          # all runs and seeds, 40 minutes; writes both CSV files
python -m scripts.provoke --only gpt,nan --seeds 5    # runs whose name or cause contains a word
python -m scripts.provoke --real                      # also fine-tunes SmolLM2-135M, after `make test-real`
"""

from __future__ import annotations

import argparse
import csv
import logging
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attnscale.diagnostics import Event, MemorySink, Record
from attnscale.diagnostics.views.display import QUANTITIES
from scripts.provoke.real import FINE_TUNING
from scripts.provoke.runs import PROVOKED, SOUND, Experiment, carry_out

EVERY = 10
# The limits of the rules were chosen with seeds 0 and 1.
SEEDS = (10, 11, 12)
RANGES = {
    "max_logit": "max",
    "relative_entropy": "mean",
    "w_max": "p50",
    "criticality": "p50",
    "first_share": "mean",
    "score_gain": "mean",
    "gain": "mean",
    "token_angle": "mean",
    "angle_ratio": "mean",
    "value_size": "mean",
}


class Outcome:
    """The events of a run, compared with what was provoked."""

    def __init__(self, experiment: Experiment, seed: int, events: list[Event], every: int) -> None:
        self.experiment, self.seed = experiment, seed
        self.events = list({event.number: event for event in reversed(events)}.values())[::-1]  # first message of each
        self.right = not self.events if experiment.begin is None else self._is_named(every)

    def _is_named(self, every: int) -> bool:
        """Whether there is one event, with the cause, layers, heads and first step of the damage."""
        if len(self.events) != 1:
            return False
        event, wanted = self.events[0], self.experiment
        layers = {int("".join(filter(str.isdigit, layer.split(".attn")[0]))) for layer, _ in event.places}
        heads = {head for _, of_layer in event.places for head in of_layer}
        begin = wanted.begin or 0
        return (
            event.cause == wanted.cause
            and begin <= event.start <= begin + 2 * every
            and (wanted.layers is None or layers == set(wanted.layers))
            and (wanted.heads is None or heads == set(wanted.heads))
        )

    def rows(self) -> list[list[str]]:
        """One row per event, or one without."""
        name, begin = self.experiment.name, self.experiment.begin
        start = [name, str(self.seed), "" if begin is None else str(begin), "yes" if self.right else "NO"]
        found = [[event.cause, str(event.start), event.message, event.advice] for event in self.events]
        return [start + event for event in found or [["none", "", "", ""]]]


HEADER = ["run", "seed", "provoked at", "as expected", "event", "first step", "message", "advice"]


def run(experiment: Experiment, seed: int) -> tuple[Outcome, list[Record]]:
    """Carry out an experiment and keep its events and records."""
    events: list[Event] = []
    sink = MemorySink(experiment.steps)
    carry_out(experiment, seed, EVERY, sinks=[sink], on_alert=events.append)
    return Outcome(experiment, seed, events, EVERY), list(sink.records)


def healthy_ranges(records: Iterable[Record]) -> list[list[str]]:
    """5th, 50th and 95th percentile of each quantity over heads and reports, after the first fifth of the run."""
    kept = list(records)
    last = max(record.step for record in kept)
    rows = []
    for name, statistic in RANGES.items():
        values = [QUANTITIES[name].of(record, statistic) for record in kept if record.step >= last / 5]
        known = sorted(value for value in values if value is not None and value == value)
        marks = statistics.quantiles(known, n=20)
        rows.append([name, statistic, *(f"{mark:.3g}" for mark in (marks[0], statistics.median(known), marks[-1]))])
    return rows


def main() -> int:
    """Run the experiments; 1 if an outcome is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="words of names or causes, separated by commas")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--real", action="store_true", help="also fine-tune SmolLM2-135M")
    parser.add_argument("--output", type=Path, help="folder for provoked.csv and healthy_ranges.csv")
    options = parser.parse_args()
    logging.getLogger("attnscale").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    words = options.only.split(",")
    experiments = (*SOUND, *PROVOKED, *([FINE_TUNING] if options.real else []))
    console, rows, ranges, right = Console(), [], [], True
    for experiment in experiments:
        if not any(word in f"{experiment.name} {experiment.cause}" for word in words):
            continue
        seeds = [0] if experiment is FINE_TUNING else [int(seed) for seed in options.seeds.split(",")]
        kept: list[Record] = []
        for seed in seeds:
            outcome, records = run(experiment, seed)
            kept += records
            right &= outcome.right
            rows += outcome.rows()
            console.print(" · ".join(filter(None, outcome.rows()[0][:7])), highlight=False)
        if experiment.begin is None:
            ranges += [[experiment.name, *row] for row in healthy_ranges(kept)]
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        names = ["run", "quantity", "statistic", "p5", "p50", "p95"]
        for name, header, content in (("provoked", HEADER, rows), ("healthy_ranges", names, ranges)):
            with (options.output / f"{name}.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([header, *content])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
