"""Measures a group of problems: providers are verified first, and only those that are right are timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.bench.gpu.clock import interleaved
from attnscale.bench.gpu.correctness import Verdict, check_a_few_rows, verify
from attnscale.bench.gpu.machine import Machine, Profile
from attnscale.bench.gpu.problem import Attention, Inputs, Problem, Provider
from attnscale.bench.gpu.results import Result, rows_of
from attnscale.bench.gpu.suites import SUITES, Group
from attnscale.bench.rows import Row

CARD = "card"  # stands for a provider in rows about the device itself


class Note(NamedTuple):
    """Why a provider was not measured; `refused` if its results were wrong."""

    refused: bool
    suite: str
    provider: str
    mode: str
    reason: str


class Outcome(NamedTuple):
    """The measured rows of a group, and notes about providers without any."""

    rows: list[Row]
    notes: list[Note]


class Contender(NamedTuple):
    """A provider on a problem: the function that is timed, how right it is, and the memory it takes."""

    provider: Provider
    step: Callable[[], Tensor]
    verdict: Verdict
    peak: int | None


class Session:
    """Verifies and times the providers of one group, and notes why the others are left out."""

    def __init__(self, group: Group, profile: Profile, machine: Machine) -> None:
        self.group, self.profile, self.machine = group, profile, machine
        self.backward = group.mode != "forward"
        self.notes: list[Note] = []

    def measure(self) -> Outcome:
        """Rows for every provider at every length."""
        rows: list[Row] = []
        problems = self.group.problems(self.profile, self.machine.device)
        small = problems[0].shrunk(self.profile.check_length)
        found = {provider: self._check(provider, small) for provider in SUITES[self.group.suite].providers}
        right = {provider: verdict for provider, verdict in found.items() if verdict is not None}
        for problem in problems:
            inputs = problem.inputs(backward=self.backward)
            entered = [self._enter(provider, verdict, problem, inputs) for provider, verdict in right.items()]
            rows += self._race(problem, [contender for contender in entered if contender is not None])
        return Outcome(rows, list(dict.fromkeys(self.notes)))

    def _check(self, provider: Provider, small: Problem) -> Verdict | None:
        """The verdict of the comparison with fp64; None where the provider is left out."""
        reason = provider.why_not(small, self.backward)
        if reason is not None:
            self._note(provider, reason)
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about each of its kernels that it cannot use
                verdict = verify(provider, small, backward=self.backward)
        except Exception as error:  # a rival may fail in any way and is left out; a provider of ours may not
            self._fail(provider, error)
            return None
        return verdict if self._accept(provider, verdict, small) else None

    def _enter(self, provider: Provider, verdict: Verdict, problem: Problem, inputs: Inputs) -> Contender | None:
        """A provider that ran once at the size that is measured, and was not grossly wrong there."""
        reason = provider.why_not(problem, self.backward)
        if reason is not None:
            self._note(provider, f"{reason} at {problem.keys} keys")
            return None
        try:
            step = step_of(provider.prepare(problem), inputs, self.backward)
            output, peak = self.machine.clock.peak(step)
            seen = check_a_few_rows(provider, problem, inputs, output)
            if self.profile.warm_up:
                self.machine.clock.seconds(step)  # the first warm-up, which refuses what cannot be timed
        except torch.OutOfMemoryError:
            self._note(provider, f"out of memory at {problem.keys} keys")
            return None
        except Exception as error:
            self._fail(provider, error)
            return None
        return Contender(provider, step, verdict, peak) if self._accept(provider, seen, problem) else None

    def _race(self, problem: Problem, contenders: list[Contender]) -> list[Row]:
        """Times of all contenders, interleaved, and the state of the card after the last round."""
        steps = {contender.provider.name: contender.step for contender in contenders}
        profile, machine = self.profile, self.machine
        samples = interleaved(steps, machine.clock, warm_up=profile.warm_up - 1, rounds=profile.rounds)
        results = [
            Result(c.provider.name, samples[c.provider.name], c.peak, c.verdict.share, c.provider.row_numbers)
            for c in contenders
        ]
        labels = problem.label, machine.name, machine.version
        suite, mode, baselines = self.group.suite, self.group.mode, SUITES[self.group.suite].baselines
        state = [
            Row(suite, CARD, mode, metric, problem.keys, number, number, number, *labels)
            for metric, number in machine.clock.telemetry().known().items()
        ]
        return rows_of(suite, mode, problem, results, baselines, machine.card, labels) + state

    def _accept(self, provider: Provider, verdict: Verdict, problem: Problem) -> bool:
        if not verdict.right:
            where = f"{problem.keys} keys, {problem.label}"
            size = f"error {verdict.error:.2e} of {verdict.quantity} where {verdict.allowed:.2e} is allowed"
            self._note(provider, f"{size} ({where})", refused=True)
        return verdict.right

    def _fail(self, provider: Provider, error: Exception) -> None:
        reason = (str(error).strip() or "no message").splitlines()[0]
        self._note(provider, f"{type(error).__name__}: {reason}", refused=provider.ours)

    def _note(self, provider: Provider, reason: str, *, refused: bool = False) -> None:
        self.notes.append(Note(refused, self.group.suite, provider.name, self.group.mode, reason))


def step_of(attend: Attention, inputs: Inputs, backward: bool) -> Callable[[], Tensor]:
    """Attention once, with backward or without gradients at all."""

    def step() -> Tensor:
        with torch.set_grad_enabled(backward):
            output = attend(*inputs.leaves).output
        if backward:
            torch.autograd.grad(output, inputs.leaves, inputs.gradient)
        return output.detach()

    return step
