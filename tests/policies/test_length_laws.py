"""The laws f(n) in their three forms, and the treatment of input shapes and dtypes by every policy."""

from __future__ import annotations

import math

import pytest
import torch
from catalogue import FIXED, build
from hypothesis import given, settings
from hypothesis import strategies as st

from attnscale.errors import ArgumentError, ArgumentTypeError
from attnscale.policies import build_policy

# f at n = 1, 2, 1024, 8192 and 2³¹, from mpmath at 40 digits. The logarithms take ln 1 as ln 2; the power has p = 0.3.
LENGTHS = (1, 2, 1024, 8192, 2**31)
LAWS = {
    "sqrt_log": (0.83255461115769776, 0.83255461115769776, 2.6327688477341593, 3.0018183401530628, 4.6354678941136357),
    "log": (0.69314718055994531, 0.69314718055994531, 6.9314718055994531, 9.010913347279289, 21.487562597358305),
    "log_squared": (
        0.48045301391820142,
        0.48045301391820142,
        48.045301391820142,
        81.196559352176041,
        461.71534637539157,
    ),
    "power": (1.0, 1.2311444133449163, 8.0, 14.928527864588919, 630.34593963259714),
}
EXTRA = {"power": {"exponent": 0.3}}

lengths = st.integers(min_value=1, max_value=2**31)
references = st.integers(min_value=2, max_value=2**31)
laws = pytest.mark.parametrize("name", LAWS)
every_fixed_policy = pytest.mark.parametrize("name", FIXED)
examples = settings(derandomize=True, deadline=None, max_examples=60)


def law(name: str, **parameters: object) -> torch.nn.Module:
    return build_policy(name, **EXTRA.get(name, {}), **parameters)


def rounded(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.float32).item()


@laws
@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[f"n={n}" for n in LENGTHS])
def test_the_absolute_form_is_the_law(name: str, index: int) -> None:
    assert law(name)(LENGTHS[index]).item() == rounded(LAWS[name][index])


@laws
@pytest.mark.parametrize("gamma", [0.25, 2.5, 3])
def test_gamma_multiplies_the_absolute_form(name: str, gamma: float) -> None:
    beta = law(name, gamma=gamma)(torch.tensor(LENGTHS))
    assert beta.tolist() == [rounded(gamma * value) for value in LAWS[name]]


@pytest.mark.parametrize("name", ["sqrt_log", "log", "log_squared"])
def test_one_visible_key_has_the_beta_of_two(name: str) -> None:
    for policy in (law(name), law(name, reference_length=2048)):
        assert policy(1).item() == policy(2).item() > 0


@laws
@given(reference=references)
@examples
def test_the_anchored_form_is_exactly_one_at_its_reference_length(name: str, reference: int) -> None:
    policy = law(name, reference_length=reference)
    assert policy(reference).item() == 1.0
    # Eight rows go through torch's vectorised logarithm, one row through the scalar one.
    assert (policy(torch.full((8,), reference)) == 1.0).all()


@laws
def test_the_anchored_form_is_the_law_over_its_value_at_the_reference_length(name: str) -> None:
    beta = law(name, reference_length=1024)(torch.tensor(LENGTHS))
    assert beta.tolist() == [rounded(value / LAWS[name][LENGTHS.index(1024)]) for value in LAWS[name]]
    assert beta[0].item() < 1.0 < beta[-1].item()


@laws
@given(n=lengths, reference=references)
@examples
def test_the_floored_form_is_the_anchored_one_but_never_below_one(name: str, n: int, reference: int) -> None:
    anchored = law(name, reference_length=reference)(n).item()
    floored = law(name, reference_length=reference, floor=True)(n).item()
    assert floored == max(1.0, anchored)


@laws
def test_the_floored_form_changes_nothing_inside_the_reference_length(name: str) -> None:
    policy = law(name, reference_length=2048, floor=True)
    assert (policy(torch.arange(0, 2049)) == 1.0).all()
    assert policy(2049).item() > 1.0


@pytest.mark.parametrize("exponent", [0.01, 0.5, 1, 2.0])
def test_the_power_has_the_exponent_it_was_given(exponent: float) -> None:
    assert build_policy("power", exponent=exponent)(4096).item() == rounded(4096**exponent)


@laws
def test_the_floored_form_needs_a_reference_length(name: str) -> None:
    with pytest.raises(ValueError, match=r"floor=True is not accepted.*reference_length"):
        law(name, floor=True)


@laws
def test_the_anchored_form_has_no_gamma(name: str) -> None:
    with pytest.raises(ValueError, match=r"gamma=2.0 is not accepted.*reference_length"):
        law(name, gamma=2.0, reference_length=2048)


@pytest.mark.parametrize("beta", [1.0, 0.125, 3])
def test_the_constant_is_its_beta_at_every_length(beta: float) -> None:
    policy = build_policy("constant", beta=beta)
    assert policy.uniform == beta
    assert (policy(torch.tensor(LENGTHS)) == beta).all()


@every_fixed_policy
@given(pair=st.tuples(lengths, lengths))
@examples
def test_beta_never_falls_as_the_length_grows(name: str, pair: tuple[int, int]) -> None:
    shorter, longer = build(name)(torch.tensor(sorted(pair))).tolist()
    assert shorter <= longer


@every_fixed_policy
@given(n=lengths)
@examples
def test_beta_is_finite_and_positive_at_every_length(name: str, n: int) -> None:
    beta = build(name)(n)
    assert beta.dtype == torch.float32
    assert 0 < beta.item() < math.inf


@every_fixed_policy
def test_rows_without_a_key_count_as_one_key(name: str) -> None:
    policy = build(name)
    assert policy(0) == policy(1)
    assert (policy(torch.tensor([0, 1])) == policy(1)).all()


@every_fixed_policy
@pytest.mark.parametrize("n", [-5, torch.tensor(-5), torch.tensor([[3, -1]])], ids=["int", "0-d", "tensor"])
def test_a_negative_number_of_keys_is_refused(name: str, n: int | torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"^n=.*-.* is not accepted: expected an int or an integer tensor >= 0"):
        build(name)(n)


@pytest.mark.parametrize("n", [2.5, math.nan, math.inf, True, "8", torch.tensor([2.5]), torch.tensor([2j])], ids=str)
def test_a_number_of_keys_that_is_no_integer_is_refused(n: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^n="):
        build("log")(n)


def test_a_tensor_is_read_back_only_where_that_costs_nothing() -> None:
    """A graph keeps one β for every n, and there is no device synchronisation."""
    policy, n = build("log"), torch.tensor([3, -1])
    expected = policy(torch.tensor([3, 0]))
    assert (torch.compile(policy, fullgraph=True, backend="eager")(n) == expected).all()
    assert (torch.func.vmap(policy)(n) == expected).all()
    assert policy(n.to("meta")).is_meta


@every_fixed_policy
def test_a_position_before_the_first_counts_as_the_first(name: str) -> None:
    policy = build(name)
    n = torch.tensor([9])
    assert policy(n, positions=torch.tensor([-1])).item() == policy(n, positions=torch.tensor([0])).item()


@every_fixed_policy
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (24,), (2, 1, 12), (2, 3, 4, 1)], ids=str)
def test_beta_has_the_shape_of_n_and_fp32(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    policy = build(name)
    # From 1 to 2³⁰, across every threshold.
    n = torch.logspace(0, 30, math.prod(shape), base=2, dtype=torch.float64).to(dtype).reshape(shape)
    beta = policy(n)
    assert beta.shape == shape
    assert beta.dtype == torch.float32
    assert not beta.requires_grad
    assert beta.flatten().tolist() == [policy(value).item() for value in n.flatten().tolist()]


@every_fixed_policy
def test_an_int_gives_one_number(name: str) -> None:
    assert build(name)(20_000).shape == ()


@every_fixed_policy
@pytest.mark.parametrize(
    ("n_shape", "position_shape"),
    [((2, 1, 3), (2, 1, 3)), ((2, 1, 1), (3,)), ((3,), (2, 1, 3)), ((), (3,)), ((2, 1, 3), ())],
)
def test_positions_broadcast_against_n(name: str, n_shape: tuple[int, ...], position_shape: tuple[int, ...]) -> None:
    n = torch.arange(1, 1 + math.prod(n_shape)).reshape(n_shape) * 3000
    positions = torch.arange(math.prod(position_shape)).reshape(position_shape) * 17_000 + 20_000
    policy = build(name)
    whole = torch.broadcast_shapes(n_shape, position_shape)
    row_by_row = [
        policy(int(a), positions=b).item()
        for a, b in zip(n.expand(whole).flatten(), positions.expand(whole).flatten(), strict=True)
    ]
    assert policy(n, positions=positions).expand(whole).flatten().tolist() == row_by_row


@every_fixed_policy
def test_beta_stays_on_the_device_of_n(name: str) -> None:
    beta = build(name)(torch.empty(2, 1, 5, dtype=torch.int64, device="meta"))
    assert beta.device.type == "meta"
    assert beta.shape == (2, 1, 5)


@every_fixed_policy
def test_a_low_default_dtype_does_not_reach_beta(name: str) -> None:
    n = torch.tensor([1, 2, 8193, 2**20])
    usual = build(name)(n)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        beta = build(name)(n)
    finally:
        torch.set_default_dtype(before)
    assert beta.dtype == torch.float32
    assert torch.equal(beta, usual)


@every_fixed_policy
def test_uniform_is_beta_or_none(name: str) -> None:
    policy = build(name)
    betas = set(policy(torch.tensor([1, 2, 3000, 2**20])).tolist())
    if policy.uniform is None:
        assert len(betas) > 1
    else:
        assert betas == {rounded(policy.uniform)}


@every_fixed_policy
def test_the_longest_beta_is_that_of_a_million_keys(name: str) -> None:
    policy = build(name)
    assert policy.longest_beta() == policy(2**20).item()


@pytest.mark.parametrize("argument", ["n", "positions"])
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([3.0]),
        torch.tensor([3], dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.tensor([3j]),
        3.0,
        True,
        "3",
    ],
    ids=repr,
)
def test_a_length_or_position_that_is_no_integer_is_refused(argument: str, value: object) -> None:
    arguments = {"n": 4, argument: value}
    shown = value.dtype if isinstance(value, torch.Tensor) else repr(value)
    with pytest.raises(ArgumentTypeError, match=f"^{argument}={shown} .*is not accepted: expected an.* integer"):
        build("llama4")(**arguments)


def test_a_falling_power_keeps_beta_at_one_up_to_the_reference_and_falls_beyond() -> None:
    policy = build_policy("power", exponent=-0.5, reference_length=1024, floor=True)
    assert policy(torch.tensor([1, 512, 1024, 4096])).tolist() == [1.0, 1.0, 1.0, 0.5]
    assert build_policy("power", exponent=0.0, reference_length=1024, floor=True)(4096) == 1.0


@pytest.mark.parametrize("exponent", [0.0, -0.5])
def test_a_power_that_does_not_grow_needs_the_floor(exponent: float) -> None:
    with pytest.raises(ArgumentError, match=f"exponent={exponent} is not accepted: .*floor=True"):
        build_policy("power", exponent=exponent, reference_length=1024)
