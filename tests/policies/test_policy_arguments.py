"""Invalid parameter values of policies; messages contain the argument and the value."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from catalogue import ARGUMENTS

from attnscale.errors import ArgumentError, ArgumentTypeError, AttnScaleError
from attnscale.policies import POLICIES, build_policy

# Every parameter with every value that its type does not accept.
NONSENSE = {
    "float": [True, "0.5", [0.5], {}, 1j, torch.tensor(0.5), math.nan, math.inf, -math.inf],
    "int": [True, "4", [4], 4.0, 2048.5, torch.tensor(4), math.nan, math.inf, 0, -1, -2048],
    "bool": [0, 1, "yes", 1.0, []],
    "Any": [True, [4], 1j],
    "Mapping[str, Any]": [True, "0-1", [4], 1j],
    "Mapping[int, Any]": [True, "0-1", [4], 1j],
}


def parameters() -> list[tuple[str, str, object]]:
    cases = []
    for name, kind in POLICIES.items():
        for field in dataclasses.fields(kind):
            if field.init and not str(field.type).startswith("Literal"):  # tested separately
                base, _, optional = str(field.type).partition(" | ")
                cases += [(name, field.name, value) for value in NONSENSE[base] + ([] if optional else [None])]
    return cases


@pytest.mark.parametrize(("name", "parameter", "value"), parameters(), ids=str)
def test_nonsense_is_refused_with_the_argument_and_the_value(name: str, parameter: str, value: object) -> None:
    right_type = type(value) is int or (type(value) is float and not _takes_int(name, parameter))
    expected = ArgumentError if right_type and not _takes_bool(name, parameter) else ArgumentTypeError
    with pytest.raises(expected) as caught:
        build_policy(name, **(ARGUMENTS[name] | {parameter: value}))
    assert str(caught.value).startswith(f"{parameter}={value!r}")
    assert "is not accepted: expected " in str(caught.value)
    assert isinstance(caught.value, ValueError if expected is ArgumentError else TypeError)
    assert isinstance(caught.value, AttnScaleError)


def _annotation(name: str, parameter: str) -> str:
    return next(str(field.type) for field in dataclasses.fields(POLICIES[name]) if field.name == parameter)


def _takes_int(name: str, parameter: str) -> bool:
    return _annotation(name, parameter).startswith("int")


def _takes_bool(name: str, parameter: str) -> bool:
    return _annotation(name, parameter) == "bool"


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("constant", "beta"),
        ("sqrt_log", "gamma"),
        ("log", "gamma"),
        ("log_squared", "gamma"),
        ("power", "gamma"),
        ("yarn", "factor"),
        ("gpt_oss", "factor"),
        ("deepseek", "factor"),
        ("longrope", "factor"),
        ("drope", "factor"),
        ("llama4", "coefficient"),
        ("mistral", "coefficient"),
        ("inkling", "coefficient"),
        ("rem", "sigma"),
        ("rem", "t"),
        ("sphere", "strength"),
    ],
)
@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, -0.5])
def test_a_number_that_must_be_positive_is_not_zero_or_negative(name: str, parameter: str, value: float) -> None:
    with pytest.raises(ArgumentError, match=f"^{parameter}={value!r} is not accepted: expected a number > 0"):
        build_policy(name, **(ARGUMENTS[name] | {parameter: value}))


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("yarn", "coefficient"),
        ("gpt_oss", "coefficient"),
        ("deepseek", "mscale"),
        ("drope", "coefficient"),
        ("asentmax", "delta"),
    ],
)
def test_a_number_that_may_be_zero_is_not_negative(name: str, parameter: str) -> None:
    assert getattr(build_policy(name, **(ARGUMENTS[name] | {parameter: 0})), parameter) == 0
    with pytest.raises(ArgumentError, match=f"^{parameter}=-0.1 is not accepted: expected a number >= 0"):
        build_policy(name, **(ARGUMENTS[name] | {parameter: -0.1}))


@pytest.mark.parametrize("rho", [-1, -1.0, 1, 1.0, 1.5, -7])
def test_a_mean_cosine_lies_inside_minus_one_and_one(rho: float) -> None:
    with pytest.raises(ArgumentError, match=rf"^rho={rho!r} is not accepted: expected a number in \(-1, 1\)"):
        build_policy("simplex", rho=rho)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *[(name, "reference_length") for name in ("log", "qwen", "ssmax", "su_entropy", "infoscale", "lumina")],
        ("swan", "a"),
        ("hypenet", "a"),
        ("grok2", "threshold"),
        ("longrope", "original_length"),
    ],
)
def test_a_length_inside_a_logarithm_is_at_least_two(name: str, parameter: str) -> None:
    assert getattr(build_policy(name, **(ARGUMENTS[name] | {parameter: 2})), parameter) == 2
    with pytest.raises(ArgumentError, match=f"^{parameter}=1 is not accepted: expected an int >= 2"):
        build_policy(name, **(ARGUMENTS[name] | {parameter: 1}))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("power", {"exponent": 100.0}),
        ("power", {"exponent": 200.0, "reference_length": 4096}),
        ("constant", {"beta": 10**400}),
        ("constant", {"beta": 1e39}),
        ("constant", {"beta": torch.nn.Parameter(torch.tensor(1.0))}),
        ("log", {"reference_length": 2**70}),
        ("mistral", {"floor_length": 2**70}),
        ("ssmax", {"num_heads": 2, "init": 1e300}),
    ],
)
def test_a_number_that_fp32_or_int64_cannot_hold_is_refused(name, parameters):
    with pytest.raises(AttnScaleError, match="is not accepted: expected"):
        build_policy(name, **parameters)


@pytest.mark.parametrize("name", POLICIES)
def test_numbers_of_numpy_build_the_same_policy_of_plain_data(name: str, tmp_path) -> None:
    given = build_policy(name, **ARGUMENTS[name]).to_dict()
    kinds = {int: np.int64, float: np.float64}
    numpys = {key: kinds[type(value)](value) if type(value) in kinds else value for key, value in given.items()}
    policy = build_policy(numpys)
    assert json.loads(json.dumps(policy.to_dict())) == json.loads(json.dumps(given))
    policy.save(tmp_path / "policy.yaml")
    assert build_policy(tmp_path / "policy.yaml").to_dict() == given
    for field in dataclasses.fields(policy):
        assert not isinstance(getattr(policy, field.name, None), np.generic)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32])
def test_a_number_of_numpy_may_have_any_width(kind) -> None:
    assert build_policy("constant", beta=kind(2)).uniform == 2.0
    assert build_policy("log", gamma=kind(2)).identity == build_policy("log", gamma=2.0).identity


def test_numbers_of_numpy_inside_a_mapping_are_written_as_plain_data(tmp_path) -> None:
    heads = {"1-2": {"name": "log", "reference_length": np.int64(64)}, "3": {"name": "constant", "beta": np.float32(2)}}
    policy = build_policy("per_head", num_heads=np.int64(4), heads=heads)
    policy.save(tmp_path / "policy.yaml")
    again = build_policy(tmp_path / "policy.yaml")
    assert torch.equal(again(1000), policy(1000))
    assert again.to_dict() == policy.to_dict()


@pytest.mark.parametrize("n", [np.int64(1000), np.uint16(1000), np.array(1000)])
def test_n_may_be_a_number_of_numpy(n) -> None:
    policy = build_policy("log", reference_length=np.int64(10))
    assert torch.equal(policy(n), policy(1000))


@pytest.mark.parametrize("n", [np.True_, np.float64(3), np.array([3]), "3", 3.0, True, None])
def test_an_n_that_is_no_int_is_refused(n) -> None:
    with pytest.raises(ArgumentTypeError, match=r"n=.* is not accepted: expected an int or an integer tensor"):
        build_policy("log")(n)
