"""Calls without heads, dimensions, rows or keys, on the meta device and under autocast do what those of torch do."""

import itertools

import pytest
import torch
from oracle import additive, assert_within_budget, differentiate, exact, tensors, torch_error, visibility
from torch import Tensor
from torch.nn import functional as F

from attnscale import (
    ArgumentTypeError,
    BackendError,
    MultiheadAttention,
    StatsRequest,
    attention_weights,
    attention_with_stats,
    build_policy,
    scaled_dot_product_attention,
)
from attnscale.statistics.gaps import Accumulation

EMPTY = {
    "no_dimension": ((2, 3, 5, 0), (2, 3, 6, 0), (2, 3, 6, 4)),
    "no_dimension_at_all": ((2, 3, 5, 0), (2, 3, 6, 0), (2, 3, 6, 0)),
    "no_value": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 0)),
    "no_head": ((2, 0, 5, 4), (2, 0, 6, 4), (2, 0, 6, 4)),
    "no_query": ((2, 3, 0, 4), (2, 3, 6, 4), (2, 3, 6, 4)),
    "no_key": ((2, 3, 5, 4), (2, 3, 0, 4), (2, 3, 0, 4)),
    "no_sequence": ((0, 3, 5, 4), (0, 3, 6, 4), (0, 3, 6, 4)),
    "nothing": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
}
POLICIES = ("constant", "log", "entropy_adaptive", "gap_adaptive")
REQUESTS = {
    "exact": StatsRequest(accumulation="exact", gap_thresholds=(0.5, 1.0)),
    "bracket": StatsRequest(accumulation="bracket"),
    "sampled": StatsRequest(rows=2),
    "gaps_alone": StatsRequest(False, False, False, False, accumulation="exact"),
}
FLOATS = ("lse", "max_logit", "w_max", "entropy", "criticality")
empty = pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
rules = pytest.mark.parametrize("rules", [{}, {"is_causal": True}], ids=["full", "causal"])


def inputs(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def with_gradients(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.sum(), given)]


@empty
@rules
@pytest.mark.parametrize("backend", ["auto", "sdpa", "blockwise", "reference"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_empty_call_gives_what_torch_gives(shapes, rules, backend, policy):
    mine, theirs = inputs(shapes), inputs(shapes)
    got = with_gradients(scaled_dot_product_attention(*mine, policy=policy, backend=backend, **rules), mine)
    expected = with_gradients(F.scaled_dot_product_attention(*theirs, **rules), theirs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)  # all scores are 0, so that no temperature makes a difference


@empty
@rules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_so_does_one_in_half_precision(shapes, rules, dtype):
    mine, theirs = ([x.detach().to(dtype).requires_grad_() for x in inputs(shapes)] for _ in range(2))
    got = with_gradients(scaled_dot_product_attention(*mine, policy="log", **rules), mine)
    expected = with_gradients(F.scaled_dot_product_attention(*theirs, **rules), theirs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_graph_of_an_empty_call_in_half_precision_is_made():
    q, k, v = (x.detach().bfloat16() for x in inputs(EMPTY["no_query"]))
    graph = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    assert graph(q, k, v, is_causal=True, policy="log").shape == q.shape


@empty
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_the_statistics_of_an_empty_call_are_those_of_the_reference(shapes, request_, grad):
    with torch.set_grad_enabled(grad):
        pair = [
            attention_with_stats(*inputs(shapes), is_causal=True, policy="log", backend=backend, request=request_)
            for backend in ("auto", "reference")
        ]
    (out, got), (_, expected) = pair
    assert out.shape == (*shapes[0][:3], shapes[2][-1])
    rows = shapes[0][:2] + ((min(2, shapes[0][2]),) if request_.rows else shapes[0][2:3])
    assert got.visible.shape == rows
    for name in ("visible", *FLOATS, "gap_counts"):
        if getattr(expected, name) is None:
            assert getattr(got, name) is None
        else:
            torch.testing.assert_close(getattr(got, name), getattr(expected, name), msg=name)


@empty
def test_the_kernels_take_an_empty_call_or_refuse_it(shapes):
    mine, theirs = inputs(shapes), inputs(shapes)
    if shapes[0][1] == 0:
        with pytest.raises(BackendError, match="at least one head"):
            scaled_dot_product_attention(*mine, policy="log", backend="triton")
        return
    out = scaled_dot_product_attention(*mine, policy="log", backend="triton")
    expected = F.scaled_dot_product_attention(*theirs)
    for a, b in zip(with_gradients(out, mine), with_gradients(expected, theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_an_empty_call_with_everything_is_one_too():
    q, k, v = inputs(EMPTY["no_dimension"])
    sinks = torch.zeros(3, requires_grad=True)
    out, stats = attention_with_stats(q, k, v, softcap=2.0, sinks=sinks, policy="log", key_padding=torch.arange(6) > 3)
    torch.testing.assert_close(stats.w_max, torch.full((2, 3, 5), 1 / 5))  # four keys and a sink, all with logit 0
    out.sum().backward()
    assert torch.isfinite(sinks.grad).all()
    assert attention_weights(q, k).shape == (2, 3, 5, 6)


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(
    "policy",
    ["log", "entropy_adaptive", "gap_adaptive", {"name": "gap_adaptive", "exact": True, "gradient": "through"}],
    ids=str,
)
@pytest.mark.parametrize(
    "rules",
    [{}, {"is_causal": True}, {"softcap": 3.0}, {"window": 3}, {"backend": "blockwise"}, {"backend": "reference"}],
    ids=str,
)
def test_the_meta_device_has_shapes_and_no_values(grad, policy, rules):
    q, k, v = (torch.randn(2, heads, 9, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))
    with torch.set_grad_enabled(grad):
        out = scaled_dot_product_attention(q, k, v, enable_gqa=True, policy=policy, **rules)
        assert (out.device.type, out.shape, out.dtype) == ("meta", q.shape, q.dtype)
        if grad:
            assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("policy", ["log", "gap_adaptive"])
def test_statistics_on_the_meta_device_have_the_shapes_of_the_cpu(grad, request_, backend, policy):
    pair = []
    for device in ("meta", "cpu"):
        q = torch.randn(2, 4, 9, 8, device=device, dtype=torch.bfloat16)
        with torch.set_grad_enabled(grad):
            pair.append(attention_with_stats(q, q, q, is_causal=True, policy=policy, backend=backend, request=request_))
    assert pair[0].output.device.type == "meta"
    for on_meta, on_cpu in zip(*(found.stats for found in pair), strict=True):
        if isinstance(on_cpu, Tensor):
            assert (on_meta.device.type, on_meta.shape, on_meta.dtype) == ("meta", on_cpu.shape, on_cpu.dtype)
        elif isinstance(on_cpu, Accumulation):
            assert [x.shape for x in on_meta] == [x.shape for x in on_cpu]
        else:
            assert on_meta == on_cpu


def test_a_running_estimate_on_the_meta_device_reads_nothing():
    policy = build_policy("gap_adaptive", scope="head", num_heads=4).to("meta")
    q = torch.randn(2, 4, 9, 8, device="meta")
    for training in (True, False):
        assert scaled_dot_product_attention(q, q, q, policy=policy.train(training)).shape == q.shape


def test_a_module_on_the_meta_device_gives_shapes():
    attention = MultiheadAttention(32, 4, batch_first=True, policy="entropy_adaptive", device="meta")
    x = torch.randn(2, 9, 32, device="meta")
    out, weights = attention(x, x, x, is_causal=True)
    assert (out.shape, weights.shape, out.device.type) == ((2, 9, 32), (2, 9, 9), "meta")


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"attn_mask": additive(visibility(17, 17, causal=True)).float() + 0.25},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("backend", "call"),
    [
        *itertools.product(["blockwise", "reference"], CALLS),
        ("sdpa", "plain"),
        ("auto", "softcap"),
        ("triton", "plain"),
    ],
)
def test_under_autocast_the_output_has_its_dtype(dtype, backend, call):
    q, k, v = tensors((1, 2, 17, 16), (1, 2, 17, 16), torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        assert F.scaled_dot_product_attention(q, k, v).dtype == dtype
        out = scaled_dot_product_attention(q, k, v, policy="log", backend=backend, **CALLS[call])
        mixed = scaled_dot_product_attention(q, k.to(dtype), v, policy="log", backend=backend, **CALLS[call])
    assert out.dtype == mixed.dtype == dtype
    assert torch.equal(out, mixed)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_the_numbers_under_autocast_are_those_of_inputs_in_its_dtype(backend, backward_inside):
    wide = tensors((1, 2, 33, 16), (1, 2, 33, 16), torch.float32)
    narrow = [x.bfloat16() for x in wide]
    visible, beta = visibility(33, 33, causal=True), torch.arange(1, 34).log().clamp(min=1e-30)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(q, k, v, is_causal=True, policy="log", backend=backend)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward_inside):
        got = differentiate(attend, *wide)
    assert got["out"].dtype == torch.bfloat16
    assert got["dq"].dtype == torch.float32  # of what was given
    # Rounded as the narrow inputs are: the gradient has been through the cast.
    got = {name: x.bfloat16() for name, x in got.items()}
    own = torch_error(*narrow, beta, visible)
    assert_within_budget(got, exact(*narrow, is_causal=True, policy="log"), own, times=2)


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_autocast_does_not_reach_the_products_inside(backend, softcap):
    q, k, v = tensors((1, 2, 33, 16), (1, 2, 33, 16), torch.bfloat16)
    found = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):  # around the backward, too
            rules = {"is_causal": True, "policy": "log", "softcap": softcap, "backend": backend}
            found.append(differentiate(lambda *qkv, r=rules: scaled_dot_product_attention(*qkv, **r), q, k, v))
    # The reference has the backward of torch's own operators, and autocast does with those what it always does.
    for name in found[0] if backend == "blockwise" else ["out"]:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
def test_statistics_under_autocast_are_of_rounded_inputs_and_in_fp32(backend):
    q, k, v = tensors((1, 2, 33, 16), (1, 2, 33, 16), torch.float32)
    request = StatsRequest(accumulation="exact")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, stats = attention_with_stats(q, k, v, policy="log", backend=backend, request=request)
    expected = attention_with_stats(
        *(x.bfloat16() for x in (q, k, v)), policy="log", backend="reference", request=request
    ).stats
    assert output.dtype == torch.bfloat16
    for name in FLOATS:
        assert getattr(stats, name).dtype == torch.float32
        torch.testing.assert_close(getattr(stats, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def test_fp64_is_left_alone_by_autocast_and_does_not_mix():
    q, k, v = tensors((1, 2, 9, 8), (1, 2, 9, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for backend in ("sdpa", "blockwise", "reference"):
            out = scaled_dot_product_attention(q, k, v, policy="log", backend=backend)
            assert out.dtype == torch.float64
            torch.testing.assert_close(out, exact(q, k, v, policy="log")["out"])
        for backend in ("blockwise", "reference"):
            with pytest.raises(ArgumentTypeError, match="under autocast"):
                scaled_dot_product_attention(q, k.float(), v, policy="log", backend=backend)


def test_weights_are_not_rounded_by_autocast():
    q, k, _ = tensors((1, 2, 9, 8), (1, 2, 9, 8), torch.float32)
    expected = attention_weights(q, k, policy="log")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_weights(q, k, policy="log"), expected)


def test_autocast_compiles():
    torch.compiler.reset()
    q, k, v = tensors((1, 2, 9, 8), (1, 2, 9, 8), torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scaled_dot_product_attention(q, k, v, policy="log", softcap=3.0)

    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(got, attend(q, k, v))
    torch.compiler.reset()
