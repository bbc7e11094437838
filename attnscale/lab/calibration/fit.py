"""Temperatures learned from the model's own loss: one exponent per head of β = max(1, n/L)^p, weights frozen.

The loss is the mean of the next-token loss of the rows at the end of long texts and of the answers of long prompts,
plus an L2 term towards p = 0. Only the last rows of a sequence have gradients: the keys and values of the prefix come
from a chunked pass without gradients, so memory and time are those of a forward pass. The temperatures act in the
prefix too, which the gradient does not see; therefore the prefixes are computed again with the current temperatures in
every round, and the validation loss after a round is that of a full pass with the temperatures everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attnscale.lab.calibration.measuring import Place
from attnscale.lab.calibration.reading import Prefix, fork, score
from attnscale.lab.calibration.reading import Sequence as Tokens
from attnscale.policies.base import LengthPolicy, real
from attnscale.policies.fields import length


@dataclass(eq=False, repr=False, kw_only=True)
class FittedPower(LengthPolicy):
    """β = max(1, n/L)^p with a learned exponent p per head; `power` with `floor=True` once p is known.

    Args:
        num_heads: The number of heads H.
        reference_length: The trained length L.

    Example:
        >>> policy = FittedPower(num_heads=2, reference_length=64)
        >>> _ = policy.exponents.data.copy_(torch.tensor([0.5, 0.0]))
        >>> policy(torch.tensor([[16, 256]])).tolist()
        [[1.0, 2.0], [1.0, 1.0]]
    """

    num_heads: int = length(least=1)
    reference_length: int = length()

    def validate(self) -> None:
        self.exponents = nn.Parameter(torch.zeros(self.num_heads))

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        beyond = (real(n) / self.reference_length).clamp(min=1.0).log()
        return (self.exponents[:, None].to(beyond.dtype) * beyond).exp()

    def longest_beta(self) -> float:
        return 1.0  # before training


class FitOptions(NamedTuple):
    """How to fit.

    Attributes:
        rounds: how often the prefixes are computed again.
        steps: gradient steps per round; each uses all sequences.
        rows: number of rows with gradients at the end of a text.
        learning_rate: of Adam; about the largest change of an exponent per step.
        strength: factor of the L2 term, the sum of p² over all heads.
        chunk: tokens per forward pass.
    """

    rounds: int
    steps: int
    rows: int
    learning_rate: float
    strength: float
    chunk: int


class Round(NamedTuple):
    """The state after a round: exponents, and validation loss of a full pass; round 0 is β = 1."""

    number: int
    exponents: Mapping[Place, float]
    validation: float


Recall = Callable[[int], Round | None]
Keep = Callable[[Round], None]
Report = Callable[[str], None]


def fit(
    model: nn.Module,
    policies: Mapping[str, FittedPower],
    training: Sequence[Tokens],
    validation: Sequence[Tokens],
    options: FitOptions,
    *,
    recall: Recall = lambda number: None,
    keep: Keep = lambda round: None,
    report: Report = lambda text: None,
) -> list[Round]:
    """Fit the exponents of the policies applied to a model and return all rounds, the first with β = 1.

    Args:
        model: the model, with the policies applied.
        policies: module path → policy.
        training: sequences of the target length.
        validation: sequences of the target length, for stopping.
        options: how to fit.
        recall: returns a finished round of an interrupted fit.
        keep: called with each finished round.
        report: called with a description before each piece of work.

    Returns:
        The rounds. The fit stops after the first round that does not improve the validation loss.
    """
    rounds: list[Round] = []
    with _frozen(model, policies):
        for number in range(options.rounds + 1):
            done = recall(number)
            if done is None:
                if number > 0:
                    _train(model, policies, training, options, partial(_prefixed, report, f"round {number}, "))
                report(f"round {number}, validation")
                exponents = read_exponents(policies)
                loss = _mean([_full_loss(model, one, options) for one in validation])
                done = Round(number, exponents, loss)
                keep(done)
            _set_exponents(policies, done.exponents)
            rounds.append(done)
            if number > 0 and done.validation >= min(one.validation for one in rounds[:-1]):
                break
    return rounds


def _prefixed(report: Report, start: str, text: str) -> None:
    report(start + text)


def read_exponents(policies: Mapping[str, FittedPower]) -> dict[Place, float]:
    """Return the exponent of every head."""
    return {
        Place(path, head): value
        for path, policy in policies.items()
        for head, value in enumerate(policy.exponents.detach().tolist())
    }


def _set_exponents(policies: Mapping[str, FittedPower], exponents: Mapping[Place, float]) -> None:
    with torch.no_grad():
        for path, policy in policies.items():
            values = [exponents[Place(path, head)] for head in range(policy.num_heads)]
            policy.exponents.copy_(torch.tensor(values, device="cpu"))


@contextmanager
def _frozen(model: nn.Module, policies: Mapping[str, FittedPower]) -> Iterator[None]:
    """Let only the exponents require gradients."""
    known = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.requires_grad_(False)
    for policy in policies.values():
        policy.exponents.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, required in known.items():
            parameter.requires_grad_(required)


def _train(
    model: nn.Module,
    policies: Mapping[str, FittedPower],
    training: Sequence[Tokens],
    options: FitOptions,
    report: Report,
) -> None:
    """Take the steps of one round, with prefixes computed with the temperatures at its start."""
    prefixes = []
    for number, one in enumerate(training):
        report(f"prefix {number + 1} of {len(training)}")
        with torch.no_grad():
            # The scores of the prefix are not needed.
            silent = Tokens(one.tokens, torch.zeros_like(one.text), one.answers[:0], one.needles[:0])
            prefixes.append(score(model, silent, options.chunk, stop=_first_row(one, options.rows)))
    parameters = [policy.exponents for policy in policies.values()]
    optimizer = torch.optim.Adam(parameters, lr=options.learning_rate)
    texts = sum(not len(one.answers) for one in training)
    for step in range(options.steps):
        report(f"step {step + 1} of {options.steps}")
        optimizer.zero_grad()
        for one, prefix in zip(training, prefixes, strict=True):
            kind = texts if not len(one.answers) else len(training) - texts
            (_end_loss(model, one, prefix) / kind).backward()  # type: ignore[no-untyped-call]
        penalty = options.strength * torch.stack([p.square().sum() for p in parameters]).sum()
        penalty.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _first_row(sequence: Tokens, rows: int) -> int:
    """Return the position from which on rows have gradients: before the first answer, or the last rows of a text."""
    if len(sequence.answers):
        return max(1, int(sequence.answers[:, 0].min()) - 1)
    return max(1, len(sequence.tokens) - rows)


def _end_loss(model: nn.Module, sequence: Tokens, prefix: Prefix) -> Tensor:
    """Return the mean loss of the scored rows behind the prefix."""
    part = sequence.tokens[prefix.length :]
    marks = (sequence.asked if len(sequence.answers) else sequence.text)[prefix.length + 1 :]
    rows = marks.nonzero()[:, 0]
    head: Tensor = model.get_output_embeddings().weight  # type: ignore[operator]
    out = model(part[None, :-1].to(head.device), past_key_values=fork(prefix.cache), use_cache=True)
    return cross_entropy(out.logits[0, rows].float(), part[1:][rows].to(head.device))


@torch.no_grad()
def _full_loss(model: nn.Module, sequence: Tokens, options: FitOptions) -> tuple[str, float]:
    """Return the kind of a sequence, and its loss over the rows that training uses, from a full pass."""
    marks = torch.zeros_like(sequence.text)
    if not len(sequence.answers):
        marks[_first_row(sequence, options.rows) + 1 :] = True
    found = score(model, sequence.with_text(marks), options.chunk)
    scored = sequence.asked if len(sequence.answers) else marks
    return "prompts" if len(sequence.answers) else "text", found.nats[scored].mean().item()


def _mean(losses: list[tuple[str, float]]) -> float:
    """Return the sum over kinds of the mean loss: text and prompts count the same."""
    kinds = {kind for kind, _ in losses}
    return math.fsum(
        math.fsum(x for kind, x in losses if kind == one) / sum(k == one for k, _ in losses) for one in kinds
    )


def plain_round(done: Round) -> dict[str, Any]:
    """Return a round as JSON data.

    >>> plain_round(Round(1, {Place("layers.0.attn", 0): 0.25}, 1.5))
    {'number': 1, 'exponents': [['layers.0.attn', 0, 0.25]], 'validation': 1.5}
    """
    exponents = [[place.layer, place.head, value] for place, value in done.exponents.items()]
    return {"number": done.number, "exponents": exponents, "validation": done.validation}


def read_round(stored: Mapping[str, Any]) -> Round:
    """Inverse of `plain_round`."""
    exponents = {Place(layer, head): value for layer, head, value in stored["exponents"]}
    return Round(stored["number"], exponents, stored["validation"])
