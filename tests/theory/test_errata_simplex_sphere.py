"""Which printed formulas on simplex and sphere hold, and the numbers of the errata in the theory README."""

from __future__ import annotations

import math

import printed_lemmas as printed
import pytest
import torch

from attnscale.theory import bounds, gap_counting, phase, simplex, sphere

N, D, RHO, Q, BETA = 8, 10, 0.4, 2.0, 3.0


def exact() -> float:
    return phase.exact_jacobian_norm(phase.simplex_tokens(N, D, RHO, Q), BETA)


def test_lemma_b8_lacks_a_factor_two_and_b9_and_b10_hold() -> None:
    y = phase.simplex_tokens(N, D, RHO)
    sums = [0.0, 0.0, 0.0]
    for i in range(N):
        for j in range(N):
            r1, r2, u, v = printed.blocks(y, RHO, BETA, i, j, u3=j)
            sums[0] += float((r1 + r2).square().sum())
            sums[1] += float(u @ (r1 + r2) @ v)
            sums[2] += float((u @ u) * (v @ v))
    assert printed.lemma_b8(N, D, RHO, BETA, cross=1.0) / sums[0] == pytest.approx(0.8573, abs=1e-4)
    assert printed.lemma_b8(N, D, RHO, BETA, cross=2.0) == pytest.approx(sums[0], rel=1e-9)
    assert printed.lemma_b9(N, RHO, BETA) == pytest.approx(sums[1], rel=1e-9)
    assert printed.lemma_b10(N, RHO, BETA) == pytest.approx(sums[2], rel=1e-9)
    assert exact() == pytest.approx(0.18088, abs=1e-5)
    assert printed.jacobian_norm(N, D, RHO, BETA, Q, cross=1.0) == pytest.approx(0.14955, abs=1e-5)
    assert printed.jacobian_norm(N, D, RHO, BETA, Q, cross=2.0) == pytest.approx(exact(), rel=1e-9)


def test_in_lemma_b6_u3_belongs_to_token_j() -> None:
    y = phase.simplex_tokens(N, D, RHO)
    z = math.exp(BETA) + (N - 1) * math.exp(BETA * RHO)
    norms = {"i": 0.0, "j": 0.0}
    for i in range(N):
        for j in range(N):
            for name, u3 in (("i", i), ("j", j)):
                r1, r2, u, v = printed.blocks(y, RHO, BETA, i, j, u3)
                norms[name] += float((((r1 + r2) * z - torch.outer(u, v)) / z**2).square().sum()) / (Q * N * D)
    assert norms["j"] == pytest.approx(exact(), rel=1e-9)
    assert norms["i"] == pytest.approx(0.17767, abs=1e-5)


def test_in_lemma_b3_the_length_of_the_token_has_the_power_minus_one() -> None:
    y = phase.simplex_tokens(N, D, RHO)
    unit = phase.exact_jacobian_norm(y, BETA)
    for q, printed_norm, true_norm in ((0.25, 0.7235, 1.4470), (4.0, 0.18088, 0.09044)):
        assert unit / math.sqrt(q) == pytest.approx(printed_norm, abs=1e-4)  # ‖x‖^(−1/2), squared
        assert phase.exact_jacobian_norm(math.sqrt(q) * y, BETA) == pytest.approx(true_norm, abs=1e-4)


def test_lemma_b5_as_printed_is_broken_by_short_tokens() -> None:
    x, beta = phase.simplex_tokens(N, D, RHO, 0.01), 0.5
    block = torch.func.jacrev(lambda t: phase.layer(t, beta, backend="reference"))(x)[0, :, 0, :].norm()
    own = simplex.weights(N, RHO, beta).own
    inner = 2 * beta + (2 * beta + math.sqrt(D)) * own
    assert float(block) == pytest.approx(5.664, abs=1e-3)
    assert 0.1**-0.5 * inner == pytest.approx(5.290, abs=1e-3)
    assert 0.1**-1 * inner > float(block)


def test_lemma_b2_and_lemmas_a3_and_a4_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    x = phase.gaussian_tokens(6, 4, 0.3, generator) * 1.7
    y, beta, alpha = phase.directions(x), 2.0, 0.7
    derivative = torch.func.jacrev(lambda t: torch.softmax(beta * t @ t.T, -1) @ t)(y)
    for j, k in ((2, 2), (1, 4)):
        torch.testing.assert_close(printed.lemma_b2(y, beta, j, k), derivative[j, :, k, :].T)
    weights = torch.softmax(beta * y @ y.T, -1)
    gram, lengths = y @ y.T, x.norm(dim=-1)
    toward = weights @ gram  # ⟨ATT(y_i), y_j⟩
    expected = alpha**2 * x @ x.T + alpha * (lengths[None] * toward + (lengths[None] * toward).T)
    after = phase.layer(x, beta, alpha)
    torch.testing.assert_close(after @ after.T, expected + weights @ gram @ weights.T)


def test_the_traces_of_lemma_b7_hold() -> None:
    y = phase.simplex_tokens(N, D, RHO)
    total, moment, m = y.sum(0), y.T @ y, N * RHO + 1 - RHO
    assert float((moment @ moment).trace()) == pytest.approx(N * (N * RHO**2 + 1 - RHO**2))
    cube = N**2 * RHO**3 + 3 * N * RHO**2 * (1 - RHO) + (1 + 2 * RHO) * (1 - RHO) ** 2
    assert float((moment @ y[0]).square().sum()) == pytest.approx(cube)
    assert float(total.square().sum() - (total @ y[0]) ** 2) == pytest.approx((N - 1) * m * (1 - RHO))


@pytest.mark.parametrize(("n", "first", "second"), [(10**3, 5.74, 0.461), (10**6, 10.86, 0.864)])
def test_the_remainders_of_lemmas_b8_and_b9_on_the_critical_line_diverge(n: int, first: float, second: float) -> None:
    rho, d = 0.5, n
    beta = math.log(n) / (1 - rho)
    z = math.exp(beta) + (n - 1) * math.exp(beta * rho)
    remainder = printed.lemma_b8(n, d, rho, beta, cross=2.0) / (n * z**2) - (d - 1 + beta**2 * rho**2 * (1 - rho)) / 4
    assert remainder == pytest.approx(first, rel=1e-3)
    remainder = printed.lemma_b9(n, rho, beta) / (n * z**3) - beta**2 * rho**2 * (1 - rho) / 4
    assert remainder == pytest.approx(second, rel=1e-2)


def test_the_remainder_of_lemma_b8_below_the_critical_line_grows_with_d_over_n() -> None:
    n, rho = 10**6, 0.5
    beta = math.log(n)
    z = math.exp(beta) + (n - 1) * math.exp(beta * rho)
    measured = [printed.lemma_b8(n, d, rho, beta, cross=2.0) / (n * z**2) for d in (n, 10 * n)]
    assert measured == pytest.approx([25.83, 43.79], abs=0.01)
    assert beta**2 * rho**2 * (1 - rho) == pytest.approx(23.86, abs=0.01)


def test_the_proof_of_theorem_2_3_overstates_the_contraction() -> None:
    # Eq. 47 with α = 1, ‖x‖² = q₁ = 4, ρ₂ = ½: the third line is below the first.
    assert 4 + 2 * 2 * 0.5 + 0.5 > (2 + 1) ** 2 - 0.5 * (1 + 2 * 4)
    assert pytest.approx((2 + 1) ** 2 - 0.5 * (1 + 2 * 2)) == 4 + 2 * 2 * 0.5 + 0.5
    # Eq. 49 with ρ₁ = ρ₂ = 0.05 and α = 0.
    rho = 0.05
    delta = 1 / math.sqrt(rho) - 1
    assert rho + rho * (1 + 2 * delta) * delta == pytest.approx(1.429, abs=1e-3)
    assert bounds.contraction_limit(bounds.TokenRange(9, 9, rho, rho, 1.0, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize(("d", "share"), [(3, 0.33), (128, 0.47)])
def test_on_a_half_sphere_cosines_are_negative_as_often_as_not(d: int, share: float) -> None:
    z = torch.randn(400, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[:, 0].abs_()
    cosines = torch.pdist(phase.directions(z)).square() / 2  # 1 − cosine
    assert float((cosines > 1).double().mean()) == pytest.approx(share, abs=0.02)


def test_standard_gaussian_tokens_have_the_length_of_d() -> None:
    d = 512
    x = phase.gaussian_tokens(128, d, 0.5, torch.Generator().manual_seed(0))
    large = 20 * math.log(128)
    assert phase.closed_jacobian_norm(x, large) == pytest.approx(1.0, abs=0.1)
    assert phase.closed_jacobian_norm(math.sqrt(d) * x, large) == pytest.approx(1 / d, rel=0.1)


def test_the_spacings_of_appendix_d_are_a_logarithm_and_not_a_rank() -> None:
    n = 2**16
    assert gap_counting.gaussian_quantile(n) * gap_counting.mean_gap(n, 9) == pytest.approx(2.666, abs=1e-3)
    assert gap_counting.mean_gap_limit(9) == pytest.approx(2.718, abs=1e-3)  # printed: 8


def test_log_n_itself_is_subcritical_and_criticality_does_not_prevent_collapse() -> None:
    n = 10**6
    assert 1 - simplex.output_cosine(n, 0.5, math.log(n)) == pytest.approx(1e-6, rel=0.01)
    assert simplex.jacobian_norm(n, n, 0.5, math.log(n)) == pytest.approx(2e-6, rel=0.01)
    states = simplex.trajectory(n, 0.5, 2 * math.log(n), 2)
    assert [round(state.rho, 4) for state in states] == [0.5, 0.8, 1.0]
    own, other, _ = simplex.weights(n, 0.5, 2 * math.log(n))
    assert 1 / (own**2 + (n - 1) * other**2) == pytest.approx(4.0, rel=1e-4)


def test_in_high_dimension_the_critical_scale_of_the_sphere_leaves_attention_uniform() -> None:
    n, d = 4096, 65
    beta = sphere.critical_beta(n, d)
    assert beta == pytest.approx(2.361, abs=1e-3)
    assert n * sphere.mean_largest_weight_at(n, d, beta) == pytest.approx(2.66, abs=0.01)
    assert sphere.mean_largest_weight_at(n, d, math.sqrt(2 * d * math.log(n))) == pytest.approx(0.306, abs=0.002)


def test_a_supercritical_simplex_lasts_a_few_layers() -> None:
    counted = [simplex.layers_until_collapse(n, 0.5, 3 * math.log(n)) for n in (10**3, 10**4, 10**5)]
    assert counted == [5, 10, 22]


def test_the_bound_of_theorem_2_5_is_not_small_for_the_dimension_of_a_head() -> None:
    limits = [4 * gamma**2 * math.log(131072) ** 2 / d for gamma, d in ((1, 128), (1, 4096), (2, 128))]
    assert limits == pytest.approx([4.34, 0.136, 17.36], rel=1e-2)


def test_equation_75_drops_the_part_of_a_token_along_another() -> None:
    rho, beta = 0.9, 1.0
    near, far = math.exp(beta), math.exp(beta * rho)
    length = math.hypot(near + rho * far, math.sqrt(1 - rho**2) * far)
    assert (length, near + math.sqrt(1 - rho**2) * far) == pytest.approx((5.05, 3.79), abs=0.01)


def test_subcritical_attention_on_the_sphere_is_local() -> None:
    assert sphere.mean_cosine(3, 40.0) == pytest.approx(0.975, abs=1e-6)
