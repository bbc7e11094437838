"""Training runs on the source text of Python's standard library, and the ways to damage them."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attnscale
from scripts.provoke.models import HEALTHY, LENGTH, Gpt

BATCH, RATE, WARMUP = 8, 1e-3, 50
SOURCES = ("argparse", "ast", "datetime", "difflib", "inspect", "pydoc", "tarfile", "typing", "zipfile")
HEAD, LAYER = 1, 2  # where single heads and layers are damaged


@cache
def text() -> Tensor:
    """The training text as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = (folder / f"{name}.py" for name in SOURCES)
    content = b"".join(path.read_bytes() for path in found if path.exists())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


@dataclass
class Run:
    """A training run in progress; a provocation changes it at a step."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: int = 0
    rate: float = RATE
    loss_factor: float = 1.0

    def train(self, steps: int, batches: torch.Generator, monitor: attnscale.Monitor, provoke: Provocation) -> None:
        """Train, and report each step to the monitor."""
        for self.step in range(steps):
            provoke(self)
            starts = torch.randint(len(text()) - LENGTH - 1, (BATCH,), generator=batches)
            tokens = torch.stack([text()[start : start + LENGTH + 1] for start in starts])
            rate = self.rate * min(1.0, (self.step + 1) / WARMUP)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self.model.loss(tokens) * self.loss_factor
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            monitor.step(self.step)


Provocation = Callable[[Run], None]


def at(step: int, damage: Provocation) -> Provocation:
    """Damage a run once."""
    return lambda run: damage(run) if run.step == step else None


def since(step: int, damage: Provocation) -> Provocation:
    """Damage a run at each step, so that it cannot heal."""
    return lambda run: damage(run) if run.step >= step else None


def nothing(run: Run) -> None:
    """A healthy run."""


@torch.no_grad()
def scale_query(run: Run, factor: float, layers: list[int], heads: list[int] | None = None) -> None:
    """Scale the query projections of some heads."""
    for layer in layers:
        attention = run.model.blocks[layer].attn
        rows = attention.query.weight.unflatten(0, (attention.heads, -1))
        rows[range(attention.heads) if heads is None else heads] *= factor


def set_rate(run: Run, factor: float) -> None:
    """Change the learning rate."""
    run.rate = RATE * factor


@torch.no_grad()
def spoil_weight(run: Run) -> None:
    """Put a NaN into the key projection of one head."""
    attention = run.model.blocks[LAYER].attn
    attention.key.weight.unflatten(0, (attention.heads, -1))[HEAD, 0, 0] = torch.nan


def spoil_activation(run: Run) -> None:
    """Put an infinity into the input of a block, once."""

    def spoil(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        handle.remove()
        x = inputs[0].clone()
        x[0, 5, 0] = torch.inf
        return (x,)

    handle = run.model.blocks[LAYER].register_forward_pre_hook(spoil)


def spoil_gradient(run: Run) -> None:
    """Put a NaN into the gradient of one head of one layer, once; the forward pass is sound."""

    def spoil(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        handle.remove()
        width = inputs[0].shape[-1] // run.model.blocks[LAYER].attn.heads
        wrong = torch.zeros_like(inputs[0])
        wrong[0, 7, HEAD * width] = torch.nan
        out = inputs[0].clone()
        out.register_hook(lambda gradient: gradient + wrong)  # type: ignore[no-untyped-call]
        return (out,)

    handle = run.model.blocks[LAYER].attn.merge.register_forward_pre_hook(spoil)


def spoil_loss(run: Run) -> None:
    """Multiply the loss by NaN."""
    run.loss_factor = torch.nan


@torch.no_grad()
def zero(run: Run, projection: str) -> None:
    """Set a projection of one layer to zero."""
    getattr(run.model.blocks[LAYER].attn, projection).weight.zero_()


def constant(beta: float) -> Callable[[], Any]:
    """A GPT with one temperature for all lengths."""
    return lambda: Gpt(lambda: attnscale.build_policy("constant", beta=beta))


@dataclass(frozen=True)
class Experiment:
    """A run: its model, its damage, and the events that it should raise."""

    name: str
    build: Callable[[], Any]
    provoke: Provocation = nothing
    begin: int | None = None  # step of the damage; None for a healthy run
    cause: str = ""  # expected event
    layers: tuple[int, ...] | None = None  # where it should be; None for the whole model
    heads: tuple[int, ...] | None = None
    steps: int = 300
    rate: float = RATE


START = 150
ALL = (0, 1, 2, 3)
PROVOKED = (
    Experiment("learning rate × 30", Gpt, since(START, lambda r: set_rate(r, 30.0)), START, "collapse"),
    Experiment(
        "W_q of one head × 30",
        Gpt,
        at(START, lambda r: scale_query(r, 30.0, [LAYER], [HEAD])),
        START,
        "logit_jump",
        (LAYER,),
        (HEAD,),
    ),
    Experiment(
        "W_q of one layer × 30", Gpt, at(START, lambda r: scale_query(r, 30.0, [LAYER])), START, "logit_jump", (LAYER,)
    ),
    Experiment(
        "W_q of all layers × 30", Gpt, at(START, lambda r: scale_query(r, 30.0, [*ALL])), START, "logit_jump", ALL
    ),
    Experiment(
        "W_q of one layer × 0.001",
        Gpt,
        at(START, lambda r: scale_query(r, 1e-3, [LAYER])),
        START,
        "logit_drop",
        (LAYER,),
    ),
    Experiment("β = 0.01", constant(0.01), nothing, 0, "temperature"),
    Experiment("β = 50", constant(50.0), nothing, 0, "temperature"),
    Experiment("NaN in a weight", Gpt, at(START, spoil_weight), START, "nan", (LAYER,), (HEAD,)),
    Experiment("infinite activation", Gpt, at(START, spoil_activation), START, "nan", (LAYER,)),
    Experiment("NaN in a gradient", Gpt, at(START, spoil_gradient), START, "nan", (LAYER,), (HEAD,)),
    Experiment("NaN in the loss", Gpt, at(START, spoil_loss), START, "nan", (3,)),
    Experiment("dead values", Gpt, since(START, lambda r: zero(r, "value")), START, "dead_values", (LAYER,)),
    Experiment("dead output projection", Gpt, since(START, lambda r: zero(r, "merge")), START, "dead_output", (LAYER,)),
    Experiment(
        "no residual connections", lambda: Gpt(layers=12, residual=False), nothing, 0, "rank_collapse", steps=100
    ),
)
SOUND = tuple(Experiment(name, build, steps=500) for name, build in HEALTHY.items())


@contextmanager
def prepared(
    experiment: Experiment, seed: int, every: int, **monitoring: Any
) -> Iterator[tuple[Run, attnscale.Monitor]]:
    """Build the model of an experiment, with a monitor."""
    torch.manual_seed(seed)
    model = experiment.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    with attnscale.Monitor(model, every=every, **monitoring) as monitor:
        yield Run(model, optimizer, rate=experiment.rate), monitor


def carry_out(experiment: Experiment, seed: int, every: int = 10, **monitoring: Any) -> None:
    """Run an experiment under a monitor."""
    with prepared(experiment, seed, every, **monitoring) as (run, monitor):
        run.train(experiment.steps, torch.Generator().manual_seed(1000 + seed), monitor, experiment.provoke)
