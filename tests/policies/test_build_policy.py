"""Building policies from names and mappings, the reverse, and the error messages."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from catalogue import ARGUMENTS, build, temperature

import attnscale
from attnscale.errors import ArgumentError, ArgumentTypeError, AttnScaleError
from attnscale.policies import POLICIES, STATELESS, build_policy, build_policy_for

N = torch.tensor([1, 2, 1025, 8192, 200_000])

every_policy = pytest.mark.parametrize("name", ARGUMENTS)


def test_the_catalogue_of_the_tests_holds_every_policy() -> None:
    assert sorted(ARGUMENTS) == sorted(POLICIES)


def test_build_policy_is_a_public_name() -> None:
    assert attnscale.build_policy is build_policy


@every_policy
def test_a_policy_is_built_from_its_name_and_keywords(name: str) -> None:
    policy = build_policy(name, **ARGUMENTS[name])
    assert type(policy) is POLICIES[name]
    assert {key: getattr(policy, key) for key in ARGUMENTS[name]} == ARGUMENTS[name]


@every_policy
def test_a_policy_is_built_from_a_mapping(name: str) -> None:
    spec = {"name": name, **ARGUMENTS[name]}
    assert build_policy(spec).to_dict() == build(name).to_dict()
    assert spec == {"name": name, **ARGUMENTS[name]}


def test_keywords_override_a_mapping_and_leave_it_as_it_was() -> None:
    spec = {"name": "qwen", "reference_length": 2048}
    assert build_policy(spec, reference_length=8192).reference_length == 8192
    assert spec == {"name": "qwen", "reference_length": 2048}


@every_policy
def test_a_finished_policy_is_returned_as_it_is(name: str) -> None:
    policy = build(name)
    assert build_policy(policy) is policy


def test_a_policy_of_your_own_is_returned_as_it_is() -> None:
    class Own:
        needs_query = False
        uniform = None

        def __call__(self, n: object, *, positions: object = None, query: object = None) -> torch.Tensor:
            return torch.ones(())

    own = Own()
    assert build_policy(own) is own


def test_stateless_names_need_no_arguments() -> None:
    assert set(STATELESS) == {name for name, arguments in ARGUMENTS.items() if not arguments}
    for name in STATELESS:
        assert build_policy(name).name == name


@every_policy
def test_a_policy_survives_to_dict(name: str) -> None:
    policy = build(name)
    again = build_policy(policy.to_dict())
    assert again is not policy
    assert again.to_dict() == policy.to_dict()
    assert torch.equal(temperature(again, N), temperature(policy, N))


@every_policy
def test_to_dict_is_plain_data_with_every_parameter(name: str) -> None:
    plain = build(name).to_dict()
    assert next(iter(plain.items())) == ("name", name)
    assert set(plain) - {"name"} == {field.name for field in dataclasses.fields(POLICIES[name]) if field.init}
    assert json.loads(json.dumps(plain)) == plain


@every_policy
def test_a_policy_prints_its_parameters(name: str) -> None:
    policy = build(name)
    for key, value in policy.to_dict().items():
        if key != "name":
            assert f"{key}={value!r}" in repr(policy)


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ArgumentError, match=r"^policy='zzz' is not accepted") as caught:
        build_policy("zzz")
    for name in POLICIES:
        assert name in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"), [("lama4", "llama4"), ("sqrtlog", "sqrt_log"), ("gpt-oss", "gpt_oss"), ("Qwen", "qwen")]
)
def test_an_unknown_name_suggests_a_close_one(typed: str, meant: str) -> None:
    for spec in (typed, {"name": typed}):
        with pytest.raises(ArgumentError, match=f"policy='{typed}'.*Did you mean '{meant}'"):
            build_policy(spec)


@pytest.mark.parametrize("name", [3, None, ["log"], 1.5], ids=repr)
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(AttnScaleError) as caught:
        build_policy({"name": name})
    assert f"policy={name!r}" in str(caught.value)


def test_a_mapping_without_a_name_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"policy=\{'beta': 2.0\} is not accepted: expected the key 'name'.*sqrt_log"
    ):
        build_policy({"beta": 2.0})


@pytest.mark.parametrize(
    "spec",
    [None, 3, ["log"], object(), POLICIES["log"], lambda n: n, torch.nn.Identity()],
    ids=["None", "int", "list", "object", "class", "function", "module"],
)
def test_what_is_no_policy_is_refused(spec: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^policy=.* is not accepted: expected a name, a mapping, a YAML file"):
        build_policy(spec)


@every_policy
def test_an_unknown_parameter_lists_what_is_accepted(name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        build_policy(name, **ARGUMENTS[name], tempreature=0.7)
    message = str(caught.value)
    assert "'tempreature' (value 0.7)" in message
    assert f"policy {name!r}" in message
    for field in dataclasses.fields(POLICIES[name]):
        assert (f" {field.name}" in message) == field.init


@pytest.mark.parametrize("parameter", ["_is_built", "training", "_f_reference", "name"])
def test_what_a_policy_holds_inside_is_no_parameter(parameter: str) -> None:
    for spec in ("log", {"name": "log"}):
        with pytest.raises(
            ArgumentError, match="is not accepted by policy 'log': it takes gamma, reference_length, floor"
        ):
            build_policy(spec, **{parameter: 1})


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, arguments in ARGUMENTS.items() for key in arguments], ids=str
)
def test_a_missing_parameter_is_named(name: str, key: str) -> None:
    arguments = {other: value for other, value in ARGUMENTS[name].items() if other != key}
    with pytest.raises(ArgumentError, match=f"^policy '{name}' needs {key}: it takes .*{key}"):
        build_policy(name, **arguments)


def test_all_missing_parameters_are_named_at_once() -> None:
    with pytest.raises(ArgumentError, match="'longrope' needs factor, original_length"):
        build_policy("longrope")


def test_a_finished_policy_takes_no_further_keywords() -> None:
    policy = build("log")
    with pytest.raises(ArgumentError, match=r"\['gamma'\] are not accepted.*Log\("):
        build_policy(policy, gamma=2.0)
    assert policy.gamma == 1.0


@every_policy
def test_a_policy_for_a_module_takes_the_shape_of_the_module(name: str) -> None:
    arguments = {key: value for key, value in ARGUMENTS[name].items() if key not in ("num_heads", "head_dim")}
    for spec in (name, {"name": name}):
        plain = build_policy_for(spec, num_heads=6, head_dim=32, **arguments).to_dict()
        assert plain.get("num_heads", 6) == 6
        assert plain.get("head_dim", 32) == 32


def test_a_shape_that_was_given_is_kept() -> None:
    assert build_policy_for({"name": "sphere", "head_dim": 7}, num_heads=6, head_dim=32).head_dim == 7


def test_two_modules_do_not_share_what_a_finished_policy_learns() -> None:
    policy = build("ssmax")
    first, second = (build_policy_for(policy, num_heads=4, head_dim=16) for _ in range(2))
    assert len({id(module.s) for module in (policy, first, second)}) == 3
    assert torch.equal(first.s, policy.s)
