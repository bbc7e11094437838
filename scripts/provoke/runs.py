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
from scripts.provoke.models import HEALTHY, LENGTH, Embedded, Gpt

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
            monitor.step(self.step, loss=loss.item(), lr=rate)


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


def provoked(start: int = 150, steps: int = 300, factor: float = 30.0, **model: Any) -> tuple[Experiment, ...]:
    """Every way to damage a GPT, at a step; `factor` scales weights and the learning rate."""

    def gpt(**more: Any) -> Callable[[], Gpt]:
        return lambda: Gpt(**model, **more)

    def under(beta: float) -> Callable[[], Gpt]:
        return gpt(policy=lambda: attnscale.build_policy("constant", beta=beta))

    def experiment(
        name: str,
        cause: str,
        provoke: Provocation,
        layers: tuple[int, ...] | None = None,
        heads: tuple[int, ...] | None = None,
        build: Callable[[], Gpt] | None = None,
    ) -> Experiment:
        begin = start if build is None else 0
        return Experiment(name, build or gpt(), provoke, begin, cause, layers, heads, steps)

    all_layers, times = tuple(range(4)), f"× {factor:g}"
    return (
        experiment(f"learning rate {times}", "divergence", since(start, lambda run: set_rate(run, factor))),
        experiment(
            f"W_q of one head {times}",
            "logit_jump",
            at(start, lambda run: scale_query(run, factor, [LAYER], [HEAD])),
            (LAYER,),
            (HEAD,),
        ),
        experiment(
            f"W_q of one layer {times}",
            "logit_jump",
            at(start, lambda run: scale_query(run, factor, [LAYER])),
            (LAYER,),
        ),
        experiment(
            f"W_q of all layers {times}",
            "logit_jump",
            at(start, lambda run: scale_query(run, factor, [*all_layers])),
            all_layers,
        ),
        experiment(
            "W_q of one layer × 0.001", "logit_drop", at(start, lambda run: scale_query(run, 1e-3, [LAYER])), (LAYER,)
        ),
        experiment("β = 0.01", "temperature", nothing, build=under(0.01)),
        experiment("β = 50", "temperature", nothing, build=under(50.0)),
        experiment("NaN in a weight", "nan", at(start, spoil_weight), (LAYER,), (HEAD,)),
        experiment("infinite activation", "nan", at(start, spoil_activation), (LAYER,)),
        experiment("NaN in a gradient", "nan", at(start, spoil_gradient), (LAYER,), (HEAD,)),
        experiment("NaN in the loss", "nan", at(start, spoil_loss), (3,)),
        experiment("dead values", "dead_values", since(start, lambda run: zero(run, "value")), (LAYER,)),
        experiment("dead output projection", "dead_output", since(start, lambda run: zero(run, "merge")), (LAYER,)),
        experiment("no residual connections", "rank_collapse", nothing, build=gpt(layers=12, residual=False)),
    )


PROVOKED = provoked()
SOUND = (
    *(Experiment(name, build, steps=500) for name, build in HEALTHY.items()),
    Experiment("embedded model", Embedded, steps=200, rate=3e-4),
)


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
