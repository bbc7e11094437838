"""Entropy collapse with and without `attnscale.AttentionLoss`, and the largest logit under its hinge.

A byte-level GPT is trained on the source text of Python's standard library, without warm-up and gradient clipping. At a
learning rate several times too high its attention collapses as described by Zhai et al. (arXiv:2303.06296): logits grow
without bound, and the entropy goes to zero. The same runs at a usable learning rate give the price of the terms.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import attnscale
from attnscale._util.checks import read_int
from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.errors import reject
from attnscale.report.chart import Chart, Mark, Point, Series, linear, logarithmic, style
from attnscale.report.drawing import png
from scripts.provoke.models import Gpt
from scripts.provoke.runs import text

LENGTH, BATCH, WIDTH, LAYERS = 64, 8, 64, 2
FLOOR, BOUND = 0.3, 15.0
RATES = MappingProxyType({"too high": 1e-2, "usable": 3e-3})
TERMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "no term": {},
        f"entropy floor {FLOOR:g}": {"entropy": 10.0, "floor": FLOOR},
        f"hinge at {BOUND:g}": {"hinge": 0.1, "bound": BOUND},
    }
)
HELD_OUT = 10  # the last tenth of the text
TESTED = 64  # sequences of the held-out text


@dataclass(frozen=True)
class AttentionLossRuns:
    """Configuration of the experiment."""

    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 400
    output: str | Path = "runs/attention_loss"

    def __post_init__(self) -> None:
        if not isinstance(self.seeds, (list, tuple)) or not self.seeds:
            reject("seeds", self.seeds, "a list of at least one int")
        seeds = tuple(read_int("seeds", seed, "ints >= 0", least=0) for seed in self.seeds)
        object.__setattr__(self, "seeds", seeds)
        object.__setattr__(self, "steps", read_int("steps", self.steps, "an int >= 1", least=1))


class Step(NamedTuple):
    """Measurements of one step, over all rows, heads and layers."""

    rate: str
    terms: str
    seed: int
    step: int
    loss: float  # cross entropy, nats per byte, without the terms
    entropy_share: float  # mean of entropy / ln n
    max_logit: float


class Outcome(NamedTuple):
    """A finished run."""

    steps: list[Step]
    held_out: float  # cross entropy on held-out text, nats per byte

    @property
    def entropy_share(self) -> float:
        """Mean over the last ten steps."""
        return statistics.fmean(step.entropy_share for step in self.steps[-10:])

    @property
    def max_logit(self) -> float:
        """Maximum over all steps."""
        return max(step.max_logit for step in self.steps)


def train(rate: str, terms: str, seed: int, steps: int) -> Outcome:
    """Train one model. Global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gpt(policy=lambda: attnscale.build_policy("constant"), width=WIDTH, layers=LAYERS)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATES[rate])
    batches, cut = torch.Generator().manual_seed(1000 + seed), len(text()) * (HELD_OUT - 1) // HELD_OUT
    penalty = attnscale.AttentionLoss(model, **TERMS[terms]) if TERMS[terms] else None
    found: list[Step] = []
    with measured(model) as rows:
        for step in range(steps):
            loss = model.loss(draw(text()[:cut], BATCH, batches))
            total = loss if penalty is None else loss + penalty()
            optimizer.zero_grad()
            torch.autograd.backward(total)
            optimizer.step()
            found.append(Step(rate, terms, seed, step, loss.item(), *summary(rows)))
            rows.clear()
    if penalty is not None:
        penalty.remove()
    with torch.no_grad():
        held_out = model.loss(draw(text()[cut:], TESTED, torch.Generator().manual_seed(0))).item()
    return Outcome(found, held_out)


def draw(source: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Draw sequences [number, LENGTH + 1] of bytes."""
    starts = torch.randint(len(source) - LENGTH - 1, (number,), generator=generator)
    return torch.stack([source[start : start + LENGTH + 1] for start in starts])


@contextmanager
def measured(model: nn.Module) -> Iterator[list[attnscale.RowStats]]:
    """Measure every attention call of a model separately from the loss under test."""
    rows: list[attnscale.RowStats] = []

    def measure(module: Any, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        query, key, value = (x.detach() for x in inputs)
        rows.append(attnscale.attention_with_stats(query, key, value, policy=module.policy, **options).stats)

    modules = [module for module in model.modules() if isinstance(module, attnscale.ScaledDotProductAttention)]
    handles = [module.register_forward_pre_hook(measure, with_kwargs=True) for module in modules]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def summary(rows: Sequence[attnscale.RowStats]) -> tuple[float, float]:
    """Return the mean entropy relative to ln n, over rows with two keys at least, and the largest logit."""
    shares = [(stats.entropy / stats.visible.log())[stats.visible > 1] for stats in rows]
    return torch.cat(shares).mean().item(), max(stats.max_logit.max().item() for stats in rows)


def run(config: AttentionLossRuns, progress: Callable[[int, int, str], None] | None = None) -> Path:
    """Train all models, write `attention_loss.csv`, its `.png` and the table `attention_loss_summary.csv`."""
    need("matplotlib.figure", "the picture of an experiment", "report")  # fail before minutes of training
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # fp32 sums depend on it; a seed must give one model
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    cases = [(rate, terms, seed) for rate in RATES for terms in TERMS for seed in config.seeds]
    try:
        for done, (rate, terms, seed) in enumerate(cases):
            if progress is not None:
                progress(done, len(cases), f"learning rate {rate}, {terms}, seed {seed}")
            outcomes.setdefault((rate, terms), []).append(train(rate, terms, seed, config.steps))
    finally:
        torch.set_num_threads(threads)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    steps = [step for several in outcomes.values() for outcome in several for step in outcome.steps[::5]]
    write_whole(output / "attention_loss.csv", as_csv(Step._fields, steps))
    names = ("rate", "terms", "seed", "held_out_loss", "entropy_share", "max_logit")
    table = [
        (rate, terms, seed, one.held_out, one.entropy_share, one.max_logit)
        for (rate, terms), several in outcomes.items()
        for seed, one in zip(config.seeds, several, strict=True)
    ]
    write_whole(output / "attention_loss_summary.csv", as_csv(names, table))
    write_whole(output / "attention_loss.png", png(*charts(outcomes, len(config.seeds))))
    if progress is not None:
        progress(len(cases), len(cases), "done")
    return output / "attention_loss.csv"


def as_csv(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows as CSV, with numbers of five significant digits."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([f"{x:.5g}" if isinstance(x, float) else x for x in row] for row in rows)
    return file.getvalue()


def charts(outcomes: Mapping[tuple[str, str], Sequence[Outcome]], seeds: int) -> list[Chart]:
    """Entropy and largest logit at the learning rate that is too high: median of the seeds, with their range."""
    found = []
    for name in ("entropy_share", "max_logit"):
        series = []
        for place, terms in enumerate(TERMS):
            runs = [outcome.steps[::5] for outcome in outcomes["too high", terms]]
            line = []
            for steps in zip(*runs, strict=True):
                values = [getattr(step, name) for step in steps]
                line.append(Point(steps[0].step, statistics.median(values), min(values), max(values)))
            series.append(Series(terms, style(place), line))
        each = [value for one in series for point in one.points for value in (point.low, point.high)]
        x = linear("step", [point.x for point in series[0].points], least=0)
        title = f"Learning rate {RATES['too high']:g}, {seeds} seeds"
        if name == "entropy_share":
            marks, y = [Mark("floor", y=FLOOR)], linear("mean of entropy / ln n", [], least=0, most=1)
        else:
            marks, y = [Mark("bound", y=BOUND)], logarithmic("largest logit (log scale)", [v for v in each if v])
        found.append(Chart(title, series, x, y, marks))
    return found
