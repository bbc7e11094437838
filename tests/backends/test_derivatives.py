"""Forward mode, torch.func and second derivatives: the right number or an error that says what to do, never zero."""

from collections.abc import Callable

import pytest
import torch
from oracle import tensors
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale import (
    BackendError,
    StatsRequest,
    attention_with_stats,
    build_policy,
    explain_dispatch,
    scaled_dot_product_attention,
)

Q, K, V = tensors((2, 4, 5, 4), (2, 2, 5, 4), seed=1)
TANGENTS = tensors((2, 4, 5, 4), (2, 2, 5, 4), seed=2)
SINKS = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
RULES = {"is_causal": True, "enable_gqa": True, "policy": "log"}
# Whatever cannot go through torch's own attention, and so went to the tiles.
CALLS: dict[str, dict] = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": SINKS}, "statistics": {}}
calls = pytest.mark.parametrize("call", CALLS)
# torch's own, when its rules of forward mode are first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def attention(call: str, **more: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    rules = RULES | CALLS[call] | more
    if call == "statistics" and more.get("backend") != "reference":
        return lambda q, k, v: attention_with_stats(q, k, v, **rules).output
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **rules)


def in_forward_mode(attend: Callable[..., Tensor]) -> Tensor | None:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip((Q, K, V), TANGENTS, strict=True)]
        return forward_ad.unpack_dual(attend(*duals)).tangent


def under_no_grad(attend: Callable[..., Tensor]) -> Tensor | None:
    with torch.no_grad():
        return in_forward_mode(attend)


def penalty(attend: Callable[..., Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: attend(x, K, V).square().sum())(x).square().sum()


DERIVATIVES: dict[str, Callable[[Callable[..., Tensor]], Tensor | None]] = {
    "jvp": lambda attend: torch.func.jvp(attend, (Q, K, V), TANGENTS)[1],
    "forward_ad": in_forward_mode,
    "forward_ad_under_no_grad": under_no_grad,
    "jacfwd": lambda attend: torch.func.jacfwd(lambda q: attend(q, K, V).sum((0, 1, 2)))(Q),
    "grad": lambda attend: torch.func.grad(lambda q: attend(q, K, V).square().sum())(Q),
    "grad_of_grad": lambda attend: torch.func.grad(lambda q: penalty(attend, q))(Q),
    "jacrev": lambda attend: torch.func.jacrev(lambda q: attend(q, K, V).sum((0, 1, 2)))(Q),
    "hessian": lambda attend: torch.func.hessian(lambda q: attend(q, K, V).square().sum())(Q)[0, 0],
    "vmap_of_grad": lambda attend: torch.vmap(torch.func.grad(lambda q: attend(q, K, V).square().sum()))(
        torch.stack([Q, 2 * Q])
    ),
}
derivatives = pytest.mark.parametrize("derivative", DERIVATIVES)


def by_difference(attend: Callable[..., Tensor], step: float = 1e-6) -> Tensor:
    ends = [attend(*(x + sign * step * t for x, t in zip((Q, K, V), TANGENTS, strict=True))) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * step)


@calls
@derivatives
def test_auto_gives_every_derivative_of_the_reference(call, derivative):
    take = DERIVATIVES[derivative]
    got, expected = take(attention(call)), take(attention(call, backend="reference"))
    assert (expected != 0).any()
    torch.testing.assert_close(got, expected)


@calls
def test_the_tangent_is_that_of_finite_differences(call):
    torch.testing.assert_close(in_forward_mode(attention(call)), by_difference(attention(call)), rtol=1e-5, atol=1e-6)


@derivatives
@pytest.mark.parametrize("backend", ["blockwise", "triton"])
def test_a_backend_with_one_backward_pass_refuses_by_name(derivative, backend):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.float() for x in (q, k, v))  # which the kernels take
        return scaled_dot_product_attention(q, k, v, backend=backend, **RULES)

    with pytest.raises(BackendError, match=rf"backend='{backend}' cannot .* backend='reference' has"):
        DERIVATIVES[derivative](attend)


def test_dispatch_says_why_the_reference_runs():
    chosen = []

    def attend(q: Tensor) -> Tensor:
        chosen.append(explain_dispatch(q, K, V, softcap=3.0, **RULES))
        return q

    attend(Q)
    torch.func.jvp(attend, (Q,), (Q,))
    torch.vmap(attend)(torch.stack([Q, Q]))
    assert [found.chosen for found in chosen] == ["blockwise", "reference", "blockwise"]
    reasons = {verdict.backend: verdict.reason for verdict in chosen[1].verdicts}
    assert "no torch.func.jvp" in reasons["blockwise"]


@pytest.mark.parametrize("which", ["beta", "sinks", "bias"])
def test_a_tangent_of_another_argument_arrives_too(which):
    bias = torch.zeros(5, 5, dtype=torch.float64)
    policy = build_policy("ssmax", num_heads=4).double()

    def attend(s: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        call = torch.func.functional_call(_Attend(policy), {"policy.s": s}, (sinks, bias))
        assert isinstance(call, Tensor)
        return call

    given = {"beta": policy.s.detach(), "sinks": SINKS, "bias": bias}
    tangents = {name: torch.ones_like(x) if name == which else torch.zeros_like(x) for name, x in given.items()}
    got = torch.func.jvp(attend, tuple(given.values()), tuple(tangents.values()))[1]
    step = 1e-3 if which == "beta" else 1e-6  # β is fp32
    ends = [attend(*(x + sign * step * tangents[name] for name, x in given.items())) for sign in (1, -1)]
    assert (got != 0).any()
    torch.testing.assert_close(got, (ends[0] - ends[1]).detach() / (2 * step), rtol=1e-3, atol=1e-4)


class _Attend(torch.nn.Module):
    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, sinks: Tensor, bias: Tensor) -> Tensor:
        rules = RULES | {"policy": self.policy}
        return scaled_dot_product_attention(Q, K, V, bias, sinks=sinks, **rules)


@calls
def test_a_second_backward_is_refused_and_the_reference_has_it(call):
    found = {}
    for backend in ("auto", "reference"):
        q = Q.clone().requires_grad_()
        (first,) = torch.autograd.grad(attention(call, backend=backend)(q, K, V).square().sum(), q, create_graph=True)
        found[backend] = first.detach()
        if backend == "auto":
            with pytest.raises(BackendError, match="backend='reference'"):
                torch.autograd.grad(first.square().sum(), q)
        else:
            assert (torch.autograd.grad(first.square().sum(), q)[0] != 0).any()
    torch.testing.assert_close(found["auto"], found["reference"])


@calls
def test_a_tangent_of_the_upstream_gradient_is_refused(call):
    q = Q.clone().requires_grad_()
    out = attention(call)(q, K, V)

    def pull(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(out, q, upstream, retain_graph=True)[0]

    with pytest.raises(BackendError, match="cannot compute this backward"):
        torch.func.jvp(pull, (Q,), (Q,))
    with forward_ad.dual_level(), pytest.raises(BackendError, match="cannot compute this backward"):
        pull(forward_ad.make_dual(Q, Q))
    batch = torch.stack([Q, 2 * Q])
    many = torch.autograd.grad(out, q, batch, is_grads_batched=True, retain_graph=True)[0]  # vmap alone is no obstacle
    torch.testing.assert_close(many, torch.stack([pull(Q), pull(2 * Q)]))


@calls
def test_vmap_runs_the_tiles(call):
    batch = torch.stack([Q, 2 * Q]).requires_grad_()
    got = torch.vmap(lambda q: attention(call)(q, K, V))(batch)
    expected = torch.stack([attention(call)(q, K, V) for q in batch])
    torch.testing.assert_close(got, expected)
    pair = [torch.autograd.grad(out.square().sum(), batch)[0] for out in (got, expected)]
    torch.testing.assert_close(*pair)


def test_statistics_are_taken_where_a_derivative_is_being_taken():
    expected = attention_with_stats(Q, K, V, request=StatsRequest(rows=3, accumulation="exact"), **RULES).stats
    seen = []

    def attend(q: Tensor) -> Tensor:
        out, stats = attention_with_stats(q, K, V, request=StatsRequest(rows=3, accumulation="exact"), **RULES)
        seen.append(stats)
        return out.sum() + stats.entropy.sum()

    with sdpa_kernel(SDPBackend.MATH):  # the output of sampled rows is torch's
        torch.func.grad(attend)(Q)
        torch.func.jvp(attend, (Q,), (Q,))
    for stats in seen:
        for name in ("entropy", "lse", "w_max", "criticality"):
            inner = getattr(stats, name)
            while torch._C._functorch.is_functorch_wrapped_tensor(inner):
                inner = torch._C._functorch.get_unwrapped(inner)
            torch.testing.assert_close(inner, getattr(expected, name))


@pytest.mark.parametrize("policy", ["entropy_adaptive", "gap_adaptive"])
def test_an_adaptive_temperature_has_the_tangent_of_the_reference(policy):
    rules = RULES | {"policy": policy, "softcap": 3.0}
    pair = [
        torch.func.jvp(lambda q, b=b: scaled_dot_product_attention(q, K, V, backend=b, **rules), (Q,), (Q,))[1]
        for b in ("auto", "reference")
    ]
    assert (pair[1] != 0).any()
    torch.testing.assert_close(*pair)


@pytest.mark.parametrize("mode", ["jvp", "forward_ad", "forward_ad_under_no_grad"])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_what_torch_computes_has_torchs_derivative_or_its_error(mode, policy):
    rules = RULES | {"policy": policy}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **rules)

    with pytest.raises(NotImplementedError, match="forward AD with _scaled_dot_product_flash_attention_for_cpu"):
        DERIVATIVES[mode](attend)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(DERIVATIVES[mode](attend), by_difference(attend), rtol=1e-5, atol=1e-6)


def test_torchs_attention_refuses_a_second_backward_with_its_own_words():
    q = Q.clone().requires_grad_()
    out = scaled_dot_product_attention(q, K, V, **RULES)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.grad(first.square().sum(), q)


def test_a_compiled_derivative_is_that_of_eager():
    torch.compiler.reset()
    attend = attention("softcap")
    for take in (
        lambda q: torch.func.jvp(lambda q: attend(q, K, V), (q,), (TANGENTS[0],))[1],
        lambda q: torch.func.grad(lambda q: attend(q, K, V).square().sum())(q),
    ):
        torch.testing.assert_close(torch.compile(take, backend="eager", fullgraph=True)(Q), take(Q))
    # And what was compiled outside of a transform is not used inside of it.
    compiled = torch.compile(lambda q: attend(q, K, V), backend="eager")
    torch.testing.assert_close(compiled(Q), attend(Q, K, V))
    pair = [torch.func.jvp(f, (Q,), (TANGENTS[0],))[1] for f in (compiled, lambda q: attend(q, K, V))]
    torch.testing.assert_close(*pair)
    torch.compiler.reset()


def test_a_graph_without_derivatives_of_these_kinds_keeps_to_the_tiles():
    torch.compiler.reset()
    seen = []

    def backend(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(attention("softcap"), backend=backend, fullgraph=True)(Q, K, V)
    torch.compiler.reset()
    assert any("rows_forward" in target for target in seen)


def _flash(q: Tensor) -> Tensor:
    from attnscale_kernels import Visibility, flash_attention

    return flash_attention(q, q, q, torch.ones(1, 1, 1), Visibility(right=0), scale=0.5).out


def _decode(q: Tensor) -> Tensor:
    from attnscale_kernels import Visibility, decode_attention

    return decode_attention(q, q, q, torch.ones(1, 1, 1), Visibility(right=0), scale=0.5).out


def _softmax(q: Tensor) -> Tensor:
    from attnscale_kernels import row_softmax

    return row_softmax(q).weights


@pytest.mark.parametrize("kernel", [_flash, _decode, _softmax])
def test_the_kernels_by_themselves_refuse_too(kernel):
    q = Q[:1, :1].float()
    with pytest.raises(RuntimeError, match=r"no torch\.func\.jvp"):
        torch.func.jvp(kernel, (q,), (q,))
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode"):
        kernel(forward_ad.make_dual(q, q))
    if kernel is not _decode:  # which has no gradient at all
        q.requires_grad_()
        (first,) = torch.autograd.grad(kernel(q).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(first.square().sum(), q)
