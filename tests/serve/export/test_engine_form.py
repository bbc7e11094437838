"""The formula of stock engines, c·(1 + b·ln(1 + ⌊pos / L⌋)): exact for some policies, refused for all others."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from attnscale import build_policy
from attnscale.errors import ArgumentError
from attnscale.policies import Policy
from attnscale.serve.export.engine_form import EngineForm, ServedLayer, fit_engine_form

CONTEXT = 4096


def layer(policy: Policy | None, path: str = "layers.0", window: int | None = None) -> ServedLayer:
    return ServedLayer(path, policy, num_heads=4, window=window)


def learned(scales: list[float], biases: list[float] | None = None) -> Any:
    policy: Any = build_policy("ssmax", num_heads=len(scales), bias=biases is not None)
    policy.s.data = torch.tensor(scales)
    if biases is not None:
        policy.b.data = torch.tensor(biases)
    return policy


def in_the_engine(form: EngineForm, path: str, positions: torch.Tensor) -> torch.Tensor:
    """β [T, H] as engines compute it, in fp32."""
    scale = 1 + form.coefficient * torch.log(1 + torch.floor(positions / form.length))
    return scale[:, None] * form.factors[path].float()


EXACT: dict[str, Any] = {
    "mistral": build_policy("mistral", floor_length=1000, coefficient=0.2),
    "anchored log": build_policy("log", reference_length=512),
    "absolute log": build_policy("log", gamma=0.3),
    "su_entropy": build_policy("su_entropy"),
    "ssmax": learned([0.1, -0.2, 0.3, 0.0]),
    "constant": build_policy("constant", beta=1.5),
    "yarn": build_policy("yarn", factor=8),
    "inkling with n0 = 1": build_policy("inkling", floor_length=1),
    "log per head": build_policy("per_head", num_heads=4, default={"name": "log", "reference_length": 64},
                                 heads={"1": {"name": "log", "reference_length": 512}}),
    "equal ratios of ssmax": learned([0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 3.0, 4.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_form_gives_the_temperature_of_the_policy_at_every_position(name: str) -> None:
    policy = EXACT[name]
    form = fit_engine_form([layer(policy)], CONTEXT, "mistral")
    positions = torch.cat([torch.arange(1, 3 * CONTEXT), torch.tensor([99_999, 100_000, 1_000_000])])
    with torch.no_grad():
        wanted = policy(positions + 1, positions=positions).reshape(-1, len(positions)).T
    found = in_the_engine(form, "layers.0", positions)
    assert found.shape == (len(positions), 4)
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
    assert form.error <= 1e-6 * float(wanted.abs().max())


def test_layers_may_differ_in_their_factors() -> None:
    first, second = build_policy("log", reference_length=64), learned([0.1, 0.2, 0.3, 0.4])
    form = fit_engine_form([layer(first), layer(second, "layers.1")], CONTEXT, "mistral")
    assert form.factors["layers.0"][0] / form.factors["layers.1"][0] == pytest.approx(1 / math.log(64) / 0.1, rel=1e-6)


def test_the_factor_of_one_law_is_a_power_of_two_so_that_weights_keep_their_bits() -> None:
    form = fit_engine_form([layer(build_policy("log", reference_length=100))], CONTEXT, "mistral")
    assert set(form.factors["layers.0"].tolist()) == {2.0**-28}


def test_steps_longer_than_the_context_are_kept() -> None:
    form = fit_engine_form([layer(build_policy("mistral", floor_length=16384))], 2048, "mistral")
    assert (form.coefficient, form.length) == (0.1, 16384)


def test_a_model_whose_layers_have_no_policy_has_the_temperature_one() -> None:
    form = fit_engine_form([layer(None)], CONTEXT, "mistral")
    assert (form.coefficient, form.factors["layers.0"].tolist()) == (0.0, [1.0] * 4)


INEXACT: dict[str, list[ServedLayer]] = {
    "floor": [layer(build_policy("log", reference_length=512, floor=True))],
    "square": [layer(build_policy("log_squared", reference_length=512))],
    "root": [layer(build_policy("sqrt_log", reference_length=512))],
    "power": [layer(build_policy("power", exponent=0.5))],
    "qwen": [layer(build_policy("qwen"))],
    "llama4": [layer(build_policy("llama4"))],
    "swan": [layer(build_policy("swan", a=1000))],
    "bias": [layer(learned([0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]))],
    "log in a window": [layer(build_policy("log", reference_length=512), window=256)],
    "log in some layers": [layer(build_policy("log", reference_length=512)), layer(None, "layers.1")],
    "two lengths of steps": [
        layer(build_policy("mistral", floor_length=64)),
        layer(build_policy("mistral", floor_length=128), "layers.1"),
    ],
}


@pytest.mark.parametrize("name", INEXACT)
def test_any_other_policy_is_refused_with_the_size_of_the_error(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"--to gguf: .* misses its β by up to") as refusal:
        fit_engine_form(INEXACT[name], CONTEXT, "gguf")
    found = re.search(r"up to (\S+) \((\S+)% of the largest β\), at position (\d+)", str(refusal.value))
    assert found is not None
    assert float(found[1]) > 0.01
    assert float(found[2]) > 0.5
    assert "--to vllm is exact" in str(refusal.value)


def test_the_size_of_the_error_is_that_of_the_formula() -> None:
    # One step of 0.1·ln 2 where the engine steps a position later.
    with pytest.raises(ArgumentError, match=r"0\.1·ln\(1 \+ ⌊pos / 8192⌋\).* up to 0\.069 .* at position 8191;"):
        fit_engine_form([layer(build_policy("llama4"))], CONTEXT, "gguf")


@pytest.mark.parametrize("name", ["gap_adaptive", "entropy_adaptive"])
def test_policies_that_read_scores_are_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"of layers.0 has no table of β by length: it reads scores"):
        fit_engine_form([layer(build_policy(name))], CONTEXT, "gguf")
