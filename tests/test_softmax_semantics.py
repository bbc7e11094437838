"""`attnscale.softmax`: weights and statistics of a score matrix, by plain torch and by the fused kernel."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from corrected_interpreter import corrected
from oracle import assert_within_budget, mean_row
from torch import Tensor

import attnscale
from attnscale import SoftmaxOutput, StatsRequest, softmax
from attnscale.errors import ArgumentError, ArgumentTypeError, BackendError

BACKENDS = ("torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STATISTICS = ("lse", "max_logit", "w_max", "entropy")
EVERYTHING = StatsRequest(gap_thresholds=(0.0, 0.5, math.inf), accumulation="exact")


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with corrected():
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(dtype: torch.dtype) -> dict[str, Tensor]:
    """Two heads of five rows: a β of either sign and 0, a mask, a bias, and a row that sees nothing."""
    mask = normal(2, 5, 33, seed=1) > -0.8
    mask[..., 0] = True
    mask[1, 3] = False
    beta = torch.tensor([[1.5, -2.0, 0.0, 4.0, 0.3], [1.0, 2.0, 3.0, 4.0, 5.0]])
    return {"scores": normal(2, 5, 33, dtype=dtype), "beta": beta, "bias": normal(5, 33, seed=2), "mask": mask}


def with_gradients(
    dtype: torch.dtype, upstream: Tensor, backend: str, **given: Tensor
) -> tuple[SoftmaxOutput, dict[str, Tensor]]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if name != "mask"}
    leaves["scores"] = leaves["scores"].detach().to(dtype).requires_grad_()
    found = softmax(**leaves, mask=given["mask"], request=EVERYTHING, backend=backend)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(found.weights, list(leaves.values()), upstream.to(dtype))
    return found, dict(zip(leaves, gradients, strict=True))


def by_torch_softmax(given: dict[str, Tensor], upstream: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights and gradients by `torch.softmax`, everything in one dtype; rows that see nothing are 0."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items() if name != "mask"}
    logits = (leaves["scores"] + leaves["bias"]) * leaves["beta"][..., None]
    empty = ~given["mask"].any(-1, keepdim=True)
    weights = logits.masked_fill(~given["mask"] & ~empty, -math.inf).softmax(-1) * ~empty
    gradients = torch.autograd.grad(weights, list(leaves.values()), upstream.to(dtype))
    return {"weights": weights.detach()} | dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_and_gradients_are_as_good_as_torchs_own(dtype: torch.dtype, backend: str) -> None:
    given, upstream = case(dtype), normal(2, 5, 33, dtype=dtype, seed=3)
    found, gradients = with_gradients(dtype, upstream, backend, **given)
    true = by_torch_softmax(given, upstream, torch.float64)
    own = by_torch_softmax(given, upstream, dtype)
    got = {"weights": found.weights.detach(), **gradients}
    errors = {name: mean_row(own[name].double() - true[name]) for name in got}
    assert_within_budget(got, true, errors, times=2.0, size=mean_row)
    assert found.weights.dtype == dtype
    assert (found.weights[1, 3] == 0).all()
    assert gradients["beta"][1, 3] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_row_statistics(dtype: torch.dtype, backend: str) -> None:
    given = case(dtype)
    stats = softmax(**given, request=EVERYTHING, backend=backend).stats  # type: ignore[arg-type]
    raw = given["scores"].double() + given["bias"]
    true = attnscale.row_statistics(raw, given["beta"].double(), given["mask"], EVERYTHING)
    for name in STATISTICS:
        torch.testing.assert_close(getattr(stats, name).double(), getattr(true, name), rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(stats.visible, true.visible)
    assert stats.gap_counts is not None
    assert torch.equal(stats.gap_counts[..., [0, 2]], true.gap_counts[..., [0, 2]])  # type: ignore[index]
    assert stats.accumulation is not None
    assert true.accumulation is not None
    torch.testing.assert_close(stats.accumulation.lower.double(), true.accumulation.lower, rtol=1e-3, atol=1e-5)
    assert stats.criticality is not None
    assert not any(x.requires_grad for x in stats if isinstance(x, Tensor))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_asked_for_is_none(backend: str) -> None:
    stats = softmax(normal(3, 8), request=StatsRequest(entropy=False, w_max=False), backend=backend).stats  # type: ignore[arg-type]
    assert stats.lse is not None
    assert stats.max_logit is not None
    assert (stats.entropy, stats.w_max, stats.gap_counts, stats.accumulation) == (None,) * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_is_hidden_by_the_mask_the_bias_minus_infinity_and_the_lowest_number(backend: str) -> None:
    scores, bias = normal(1, 8), torch.zeros(8)
    mask = torch.arange(8) != 0
    bias[1] = -1e4
    scores[0, 2], scores[0, 3] = -math.inf, torch.finfo(torch.float32).min
    found = softmax(scores, -1.5, mask=mask, bias=bias, backend=backend)  # type: ignore[arg-type]
    assert (found.weights[0, :4] == 0).all()
    torch.testing.assert_close(found.weights[0, 4:], (-1.5 * scores[0, 4:]).softmax(-1))
    assert found.stats.visible.tolist() == [4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_nan_reaches_its_row_and_no_other(backend: str) -> None:
    scores = normal(3, 8)
    scores[1, 5] = math.nan
    hidden = softmax(scores, mask=torch.arange(8) != 5, backend=backend)  # type: ignore[arg-type]
    assert hidden.weights.isfinite().all()
    found = softmax(scores, backend=backend)  # type: ignore[arg-type]
    assert found.weights[1].isnan().all()
    assert found.weights[[0, 2]].isfinite().all()
    assert found.stats.visible.tolist() == [8, 8, 8]


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 2, 3, 7), (0, 7), (3, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_have_any_number_of_axes(shape: tuple[int, ...], backend: str) -> None:
    scores = normal(*shape)
    weights, stats = softmax(scores, 2.0, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, (2 * scores).softmax(-1))
    assert stats.visible.shape == shape[:-1]
    assert stats.lse is not None
    assert stats.lse.shape == shape[:-1]


def test_plain_torch_has_every_derivative() -> None:
    scores = normal(2, 5).double().requires_grad_()
    beta = torch.tensor([0.7, -1.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda s, b: softmax(s, b, backend="torch").weights, (scores, beta))
    with pytest.raises(BackendError, match=r"torch.func.grad"):
        torch.func.grad(lambda s: softmax(s, backend="triton").weights.square().sum())(scores.float().detach())


def test_it_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    scores, beta = normal(3, 9), torch.tensor([1.0, 2.0, 3.0])
    for backend in BACKENDS:
        compiled = torch.compile(lambda s, b: softmax(s, b, backend=backend), fullgraph=True, backend="aot_eager")  # type: ignore[arg-type] # noqa: B023
        found, expected = compiled(scores, beta), softmax(scores, beta, backend=backend)  # type: ignore[arg-type]
        assert torch.equal(found.weights, expected.weights)
        assert torch.equal(found.stats.entropy, expected.stats.entropy)


def test_the_kernel_is_asked_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["attnscale.softmax"]
    asked: list[str] = []
    monkeypatch.setattr(module, "_by_kernel", lambda *_: asked.append("kernel"))
    softmax(normal(2, 3))  # here kernels are interpreted, which "auto" leaves to tests
    assert asked == []
    monkeypatch.setattr(module, "interpreting", lambda: False)
    softmax(normal(2, 3))
    assert asked == ["kernel"]
    softmax(normal(2, 3).double())  # which kernels do not take
    assert asked == ["kernel"]
    with pytest.raises(BackendError, match=r"backend='triton'.*float32, float16 and bfloat16, not torch.float64"):
        softmax(normal(2, 3).double(), backend="triton")
    monkeypatch.setattr(module, "why_unavailable", lambda device, dtype: f"no kernels for {device.type}")
    assert softmax(normal(2, 3)).weights.shape == (2, 3)
    with pytest.raises(BackendError, match="no kernels for cpu"):
        softmax(normal(2, 3), backend="triton")


ONES = torch.ones(2, 3, 4)
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (ArgumentTypeError, r"scores=3 \(int\).*floating tensor", {"scores": 3}),
    "integers": (ArgumentTypeError, r"scores of torch.int64", {"scores": torch.arange(4)}),
    "a number": (ArgumentError, r"scores of shape \[\].*\[..., keys\]", {"scores": torch.tensor(1.0)}),
    "a word for β": (ArgumentTypeError, r"beta='hot' \(str\).*a number", {"beta": "hot"}),
    "a flag for β": (ArgumentTypeError, r"beta=True \(bool\).*a number", {"beta": True}),
    "an integer β": (ArgumentTypeError, r"beta of torch.int64", {"beta": torch.tensor(1)}),
    "β of keys": (ArgumentError, r"beta of shape \[4\].*broadcasts to \[2, 3\]", {"beta": torch.ones(4)}),
    "β elsewhere": (ArgumentError, r"beta on meta.* cpu", {"beta": torch.ones(3, device="meta")}),
    "a float mask": (ArgumentTypeError, r"mask of torch.float32.*bool", {"mask": ONES}),
    "a wide mask": (ArgumentError, r"mask of shape \[5\].*\[2, 3, 4\]", {"mask": torch.ones(5, dtype=torch.bool)}),
    "a mask elsewhere": (ArgumentError, r"mask on meta", {"mask": torch.ones(4, dtype=torch.bool, device="meta")}),
    "a list as bias": (ArgumentTypeError, r"bias=\[1.0\] \(list\)", {"bias": [1.0]}),
    "a bool bias": (ArgumentTypeError, r"bias of torch.bool", {"bias": ONES.bool()}),
    "a deep bias": (ArgumentError, r"bias of shape \[1, 2, 3, 4\]", {"bias": ONES[None]}),
    "another backend": (ArgumentError, r"backend='cuda'.*'auto', 'torch' or 'triton'", {"backend": "cuda"}),
    "no request": (ArgumentTypeError, r"request='all'.*StatsRequest", {"request": "all"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_named(case: str) -> None:
    error, message, arguments = REFUSED[case]
    with pytest.raises(error, match=message):
        softmax(**({"scores": ONES} | arguments))
