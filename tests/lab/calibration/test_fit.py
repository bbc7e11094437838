"""The fit of exponents by gradient descent: gradients, validation, resuming."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from small_calibration import NEEDLES

import attnscale.hf
from attnscale.lab.calibration.fit import FitOptions, FittedPower, fit, plain_round, read_exponents, read_round
from attnscale.lab.calibration.fit import _end_loss as end_loss
from attnscale.lab.calibration.fit import _full_loss as full_loss
from attnscale.lab.calibration.reading import prompt, score, window
from attnscale.policies import build_policy

OPTIONS = FitOptions(rounds=1, steps=4, rows=64, learning_rate=0.05, strength=1e-3, chunk=256)


@contextmanager
def fitted(model):
    with attnscale.hf.apply(model, FittedPower(num_heads=2, reference_length=128), layers="full") as handle:
        yield handle.policies


def sequences(prose, number: int = 2, seed: int = 0):
    texts = [window(prose, 1024, i, number) for i in range(number)]
    return texts + [prompt(prose, NEEDLES, 1024, 128, seed, i) for i in range(number)]


def test_the_law_of_the_fit_is_the_power_that_is_written() -> None:
    policy = FittedPower(num_heads=2, reference_length=64)
    policy.exponents.data.copy_(torch.tensor([0.25, -0.5]))
    n = torch.tensor([[1, 64, 65, 1000, 10**6]])
    for row, exponent in zip(policy(n).detach(), (0.25, -0.5), strict=True):
        law = build_policy("power", exponent=exponent, reference_length=64, floor=True)
        torch.testing.assert_close(row, law(n)[0])


@pytest.mark.parametrize("kind", [0, 2], ids=["text", "prompt"])
def test_the_gradient_behind_a_prefix_is_that_of_the_whole_loss(model, prose, kind) -> None:
    # Keys of the prefix do not depend on the exponents here: only the last layer has them.
    sequence = sequences(prose)[kind]
    with fitted(model) as policies:
        (policy,) = policies.values()
        start = int(sequence.answers.min()) - 1 if kind else 1024 - OPTIONS.rows
        with torch.no_grad():
            prefix = score(model, sequence, 256, stop=start)
        loss = end_loss(model, sequence, prefix)
        loss.backward()
        assert loss.item() == pytest.approx(full_loss(model, sequence, OPTIONS)[1], rel=1e-4)
        for head in range(2):
            values = []
            for step in (0.005, -0.005):
                with torch.no_grad():
                    policy.exponents.zero_()
                    policy.exponents[head] = step
                values.append(full_loss(model, sequence, OPTIONS)[1])
            slope = (values[0] - values[1]) / 0.01
            # The central difference is exact to second order, and fp32 losses to about 1e-6/0.01.
            assert policy.exponents.grad[head].item() == pytest.approx(slope, rel=0.02, abs=1e-3)


def test_a_fit_lowers_the_loss_of_sequences_that_it_has_not_seen(model, prose) -> None:
    with fitted(model) as policies:
        rounds = fit(model, policies, sequences(prose), sequences(prose, seed=1), OPTIONS)
    assert [one.number for one in rounds] == [0, 1]
    assert rounds[1].validation < rounds[0].validation
    assert set(rounds[0].exponents.values()) == {0.0}
    assert min(rounds[1].exponents.values()) > 0.05


def test_a_fit_that_does_not_help_stops_after_its_first_round(model, prose) -> None:
    # Fitted to needles only, with huge steps: attention to text becomes far too sharp.
    harmful = OPTIONS._replace(learning_rate=3.0, rounds=3, steps=1)
    with fitted(model) as policies:
        rounds = fit(model, policies, sequences(prose)[2:], sequences(prose)[:2], harmful)
    assert [one.number for one in rounds] == [0, 1]
    assert min(rounds, key=lambda one: one.validation).number == 0


def test_the_penalty_pulls_the_exponents_to_no_change(model, prose) -> None:
    found = []
    for strength in (0.0, 100.0):
        with fitted(model) as policies:
            rounds = fit(
                model, policies, sequences(prose), sequences(prose), OPTIONS._replace(strength=strength, steps=6)
            )
        found.append(max(map(abs, rounds[1].exponents.values())))
    assert found[1] < 0.5 * found[0]


def test_only_the_exponents_change_and_the_model_is_restored(model, prose) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fitted(model) as policies:
        fit(model, policies, sequences(prose, 1), sequences(prose, 1), OPTIONS._replace(steps=1))
        assert read_exponents(policies)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_interrupted_fit_continues_from_its_rounds(model, prose) -> None:
    options, kept = OPTIONS._replace(rounds=2, steps=1), {}
    with fitted(model) as policies:
        whole = fit(
            model, policies, sequences(prose), sequences(prose), options, keep=lambda r: kept.update({r.number: r})
        )
    stored = {number: plain_round(kept[number]) for number in (0, 1)}
    said: list[str] = []
    with fitted(model) as policies:
        again = fit(
            model,
            policies,
            sequences(prose),
            sequences(prose),
            options,
            recall=lambda number: read_round(stored[number]) if number in stored else None,
            report=said.append,
        )
    assert again == whole
    assert all(text.startswith("round 2") for text in said)
