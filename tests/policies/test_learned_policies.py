"""Learned policies: head axis, initial values, gradients and module behaviour; the formulas of ssmax and asentmax."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from catalogue import BY_QUERY, LEARNED, build, temperature
from torch import Tensor
from torch.nn import functional as F

from attnscale import scaled_dot_product_attention
from attnscale.errors import ArgumentError, ArgumentTypeError
from attnscale.policies import Policy, build_policy

learned = pytest.mark.parametrize("name", LEARNED)

# β = 1 + ln 2·(ln(pos + 2))^±2, the value of asentmax for w_β·x = 0 and tanh(w_γ·x) = ±1; mpmath at 40 digits.
SATURATED = {
    0: (1.3330246519889295, 2.4426950408889634),
    1: (1.8365932692669971, 1.5742970109467445),
    8191: (57.282690978681406, 1.0085364257743146),
    16384: (66.274473873322878, 1.0073605038142568),
    2**20: (134.20989745119533, 1.0036067366097495),
}


def random_asentmax(**parameters: object) -> Policy:
    policy = build_policy("asentmax", num_heads=4, head_dim=16, **parameters)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        policy.w_beta.copy_(torch.randn(4, 16, generator=generator) / 4)
        policy.w_gamma.copy_(torch.randn(4, 16, generator=generator) / 4)
    return policy


def queries(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def plain_asentmax(w_beta: Tensor, w_gamma: Tensor, x: Tensor, position: Tensor, delta: float = 1.0) -> Tensor:
    """The formula in fp64, head by head."""
    heads = []
    for h in range(w_beta.shape[0]):
        strength = torch.log1p(torch.exp(x[:, h].double() @ w_beta[h].double()))
        exponent = 2 * torch.tanh(x[:, h].double() @ w_gamma[h].double())
        heads.append(delta + strength * torch.log(position.double() + 2) ** exponent)
    return torch.stack(heads, dim=1)


def test_ssmax_is_s_ln_n_plus_b_for_each_head() -> None:
    policy = build_policy("ssmax", num_heads=3, bias=True)
    s, b = [0.5, -1.25, 2.0], [0.0, 0.75, -3.0]
    with torch.no_grad():
        policy.s.copy_(torch.tensor(s))
        policy.b.copy_(torch.tensor(b))
    n = [1, 2, 3, 700, 8192, 2**31]
    beta = policy(torch.tensor(n))
    for h in range(3):
        # s and b are exact in fp32, so there is only the final rounding.
        plain = torch.tensor([s[h] * math.log(max(2, m)) + b[h] for m in n], dtype=torch.float64).to(torch.float32)
        assert torch.equal(beta[h], plain)


@pytest.mark.parametrize(
    ("n_shape", "beta_shape"),
    [((7,), (4, 7)), ((1, 1, 7), (1, 4, 7)), ((3, 1, 7), (3, 4, 7)), ((3, 1, 1), (3, 4, 1)), ((), (4, 1))],
    ids=str,
)
def test_ssmax_puts_the_head_axis_before_the_rows(n_shape: tuple[int, ...], beta_shape: tuple[int, ...]) -> None:
    policy = build("ssmax")
    n = torch.arange(2, 2 + math.prod(n_shape)).reshape(n_shape)
    beta = policy(n)
    assert beta.shape == beta_shape
    assert beta.dtype == torch.float32
    assert torch.equal(policy(n, positions=n - 1), beta)


def test_ssmax_of_an_int_has_one_row_per_head() -> None:
    policy = build("ssmax")
    assert torch.equal(policy(300), policy(torch.tensor([300])))
    assert policy(300).shape == (4, 1)


@pytest.mark.parametrize("reference_length", [2, 512, 2048, 131_072])
def test_ssmax_starts_with_beta_one_at_its_reference_length(reference_length: int) -> None:
    beta = build_policy("ssmax", num_heads=2, reference_length=reference_length, bias=True)(reference_length)
    # Within one rounding: 1/ln L is stored in fp32.
    torch.testing.assert_close(beta, torch.ones(2, 1), rtol=2**-23, atol=0)


def test_ssmax_starts_at_init_where_given() -> None:
    policy = build_policy("ssmax", num_heads=2, init=0.43)
    assert policy.s.tolist() == pytest.approx([0.43, 0.43])
    assert policy.longest_beta() == pytest.approx(0.43 * math.log(2**20))


def test_ssmax_has_a_bias_only_where_asked() -> None:
    assert set(build_policy("ssmax", num_heads=2).state_dict()) == {"s"}
    with_bias = build_policy("ssmax", num_heads=2, bias=True)
    assert set(with_bias.state_dict()) == {"s", "b"}
    assert torch.equal(with_bias.b, torch.zeros(2))


def test_ssmax_follows_the_position_under_a_sliding_window() -> None:
    policy = build("ssmax")
    positions = torch.tensor([5, 5000])
    assert torch.equal(policy(torch.tensor([4, 4]), positions=positions), policy(positions + 1))


@pytest.mark.parametrize("n", [1, 2])
def test_ssmax_has_the_gradient_ln_2_at_one_and_two_keys(n: int) -> None:
    policy = build_policy("ssmax", num_heads=3, bias=True)
    policy(torch.tensor([n])).sum().backward()
    assert policy.s.grad.tolist() == pytest.approx([math.log(2)] * 3)
    assert policy.b.grad.tolist() == [1.0] * 3


def test_the_heads_of_ssmax_learn_apart() -> None:
    policy = build("ssmax")
    policy(torch.tensor([10, 100]))[1].sum().backward()
    assert policy.s.grad.tolist() == pytest.approx([0.0, math.log(10) + math.log(100), 0.0, 0.0])


@pytest.mark.parametrize("delta", [0.0, 1.0, 2.5])
def test_asentmax_is_its_formula(delta: float) -> None:
    policy = random_asentmax(delta=delta)
    x = queries(2, 4, 6, 16)
    n = torch.tensor([1, 2, 3, 1025, 8192, 2**20])
    plain = plain_asentmax(policy.w_beta, policy.w_gamma, x, n - 1, delta)
    beta = policy(n, query=x)
    assert beta.dtype == torch.float32
    # fp32: a dot product of 16 terms in the exponent of ln n <= 14.
    torch.testing.assert_close(beta.double(), plain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("position", SATURATED)
@pytest.mark.parametrize("sign", [1, -1])
def test_asentmax_has_the_exponents_two_and_minus_two_at_its_limits(sign: int, position: int) -> None:
    policy = build("asentmax")
    with torch.no_grad():
        policy.w_gamma.fill_(10.0 * sign)
    beta = policy(position + 1, query=torch.ones(1, 4, 1, 16))
    target = torch.full((1, 4, 1), SATURATED[position][0 if sign == 1 else 1])
    # Four roundings: ln in fp32 counts twice in its square, then the product and the sum.
    torch.testing.assert_close(beta, target, rtol=4 * 2**-24, atol=0)


def test_asentmax_starts_with_delta_plus_ln_2_at_every_length() -> None:
    beta = build("asentmax")(torch.tensor([1, 50, 2**20]), query=queries(2, 4, 3, 16))
    torch.testing.assert_close(beta, torch.full((2, 4, 3), 1 + math.log(2)), rtol=2**-23, atol=0)


@pytest.mark.parametrize("n_shape", [(), (3,), (1, 1, 3), (2, 1, 3), (2, 1, 1)], ids=str)
def test_asentmax_has_one_beta_per_head_and_row(n_shape: tuple[int, ...]) -> None:
    policy = random_asentmax()
    n = torch.arange(5, 5 + math.prod(n_shape)).reshape(n_shape)
    x = queries(2, 4, 3, 16)
    beta = policy(n, query=x)
    assert beta.shape == (2, 4, 3)
    assert torch.equal(policy(n, positions=n - 1, query=x), beta)


def test_asentmax_takes_positions_where_they_differ_from_n() -> None:
    policy, x = random_asentmax(), queries(1, 4, 2, 16)
    positions = torch.tensor([5, 5000])
    assert torch.equal(policy(torch.tensor([4, 4]), positions=positions, query=x), policy(positions + 1, query=x))


def test_asentmax_reads_low_precision_queries_in_fp32() -> None:
    policy, x = random_asentmax(), queries(1, 4, 2, 16).bfloat16()
    n = torch.tensor([10, 1000])
    assert torch.equal(policy(n, query=x), policy(n, query=x.float()))


def test_asentmax_reads_fp64_queries_in_fp64_and_rounds_for_fp32_parameters_only() -> None:
    policy, x = random_asentmax().double(), queries(2, 4, 6, 16).double()
    n = torch.tensor([1, 2, 3, 1025, 8192, 2**20])
    plain = plain_asentmax(policy.w_beta, policy.w_gamma, x, n - 1)
    torch.testing.assert_close(policy(n, query=x), plain, rtol=1e-14, atol=0)
    assert policy.float()(n, query=x).dtype == torch.float32


def test_asentmax_refuses_to_work_without_queries() -> None:
    with pytest.raises(ArgumentTypeError, match=r"query=None \(NoneType\) is not accepted"):
        build("asentmax")(5)


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (2, 4, 5, 8), (2, 5, 4, 16), (4, 16), (16,), ()], ids=str)
def test_asentmax_refuses_queries_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        build("asentmax")(5, query=torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)
    assert "[B, 4, Tq, 16]" in str(caught.value)


@pytest.mark.parametrize("n", [1, 2])
def test_asentmax_has_finite_gradients_at_one_and_two_keys(n: int) -> None:
    policy = random_asentmax()
    x = queries(1, 4, 1, 16).requires_grad_()
    policy(n, query=x).sum().backward()
    for gradient in (policy.w_beta.grad, policy.w_gamma.grad, x.grad):
        assert gradient.isfinite().all()
        assert (gradient != 0).all()


def test_asentmax_has_the_gradients_of_its_formula() -> None:
    policy = random_asentmax()
    x = queries(2, 4, 3, 16).requires_grad_()
    n = torch.tensor([1, 300, 70_000])
    inputs = (policy.w_beta, policy.w_gamma, x)
    got = torch.autograd.grad(policy(n, query=x).square().sum(), inputs)
    plain = torch.autograd.grad(plain_asentmax(policy.w_beta, policy.w_gamma, x, n - 1).square().sum(), inputs)
    for ours, theirs in zip(got, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())


@learned
def test_a_state_dict_carries_what_was_learned(name: str) -> None:
    trained, fresh = build(name), build(name)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.copy_(torch.linspace(0.1, 0.4, parameter.numel()).reshape(parameter.shape))
    n = torch.tensor([3, 900])
    assert not torch.equal(temperature(fresh, n), temperature(trained, n))
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(temperature(fresh, n), temperature(trained, n))


@learned
def test_a_deep_copy_learns_on_its_own(name: str) -> None:
    policy = build(name)
    n = torch.tensor([3, 900])
    before = temperature(policy, n).detach().clone()
    twin = copy.deepcopy(policy)
    assert torch.equal(temperature(twin, n), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(temperature(policy, n), before)
    assert not torch.equal(temperature(twin, n), before)
    assert twin.to_dict() == policy.to_dict()


@learned
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [8193, torch.tensor(8193), torch.tensor([8193])], ids=["int", "0-d", "1-d"])
def test_beta_is_in_fp32_or_more_whatever_the_parameters_dtype(name: str, dtype: torch.dtype, n: int | Tensor) -> None:
    policy = build(name)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.linspace(-0.02, 0.13, parameter.numel()).reshape(parameter.shape))
    policy.to(dtype)
    assert all(parameter.dtype == dtype for parameter in policy.parameters())
    # The same values in fp32 parameters differ only by their own rounding.
    widened = copy.deepcopy(policy).to(torch.float32)
    beta = temperature(policy, n)
    assert beta.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(beta.float(), temperature(widened, n), rtol=2**-22, atol=0)


def test_the_gradient_of_an_fp64_policy_is_not_rounded():
    q, k, v = (torch.randn(3, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in "qkv")
    found = []
    for parts in ([slice(0, 3)], [slice(0, 1), slice(1, 3)]):
        policy = build_policy("ssmax", num_heads=2, reference_length=8).double()
        for part in parts:
            out = scaled_dot_product_attention(q[part], k[part], v[part], is_causal=True, policy=policy)
            out.square().sum().backward()
        found.append(policy.s.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-13)
    narrow = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, policy=policy)
    assert narrow.dtype == torch.float32


@learned
def test_a_policy_moves_to_another_device_with_its_parameters(name: str) -> None:
    policy = build(name).to("meta")
    assert all(parameter.is_meta for parameter in policy.parameters())
    n = torch.empty(2, 1, 5, dtype=torch.int64, device="meta")
    query = torch.empty(2, 4, 5, 16, device="meta") if policy.needs_query else None
    beta = policy(n, query=query)
    assert beta.is_meta
    assert beta.shape == (2, 4, 5)


@learned
def test_reset_parameters_starts_a_policy_that_was_built_on_meta(name: str) -> None:
    with torch.device("meta"):
        policy = build(name)
    assert all(parameter.is_meta for parameter in policy.parameters())
    policy.to_empty(device="cpu").reset_parameters()
    n = torch.tensor([3, 900])
    assert torch.equal(temperature(policy, n), temperature(build(name), n))


@learned
def test_every_parameter_is_trained_and_nothing_else_is_stored(name: str) -> None:
    policy = build(name)
    parameters = dict(policy.named_parameters())
    assert set(policy.state_dict()) == set(parameters)
    assert all(parameter.requires_grad for parameter in parameters.values())
    by_head = {name: tensor for name, tensor in parameters.items() if name not in policy.shared_tensors}
    assert by_head
    assert all(parameter.shape[0] == policy.num_heads for parameter in by_head.values())
    assert set(policy.shared_tensors) <= set(parameters)
    assert policy.uniform is None
    assert policy.longest_beta() > 0


@learned
def test_a_few_steps_of_gradient_descent_bring_beta_nearer_to_a_target(name: str) -> None:
    policy = build(name)
    n = torch.tensor([4, 64, 1024, 16_384])
    query = queries(8, 4, 4, 16) if policy.needs_query else None
    target = 0.5 * torch.log(n.float())
    rate = {"head_scale": 0.1, "selective": 0.3, "qassmax": 1e-3}.get(name, 1e-2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=rate)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        beta = policy(n, query=query)
        loss = F.mse_loss(beta, target.expand_as(beta))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", BY_QUERY)
def test_autocast_does_not_touch_the_precision_of_a_query_policy(name: str) -> None:
    policy = build(name)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    query = torch.randn(2, 4, 6, 16, generator=generator)
    exact = policy(torch.arange(1, 7), query=query)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy(torch.arange(1, 7), query=query), exact)
