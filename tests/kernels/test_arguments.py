"""Argument checks of the public operators: typed errors that name the argument, in every mode.

Kernels receive raw pointers and strides, so an invalid tensor that passes the checks would be read out of bounds or
with the wrong shape. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from corrected_interpreter import corrected
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnscale_kernels
from attnscale_kernels import (
    KernelArgumentError,
    KernelError,
    KernelTypeError,
    Visibility,
    accumulation_bracket,
    adaptive_attention,
    decode_attention,
    flash_attention,
    gap_counts,
    row_softmax,
)
from attnscale_kernels.flash import mask as masks
from attnscale_kernels.flash.op import flash_backward_op, flash_forward_op
from attnscale_kernels.layers import ScaledAttention
from attnscale_kernels.operators import FlatAttention
from attnscale_kernels.softmax.op import softmax_backward_op

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 4, 2, 5, 7, 16, 8
ROWS, SCORES = (BATCH, HEADS, QUERIES), (BATCH, HEADS, QUERIES, KEYS)


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with corrected():
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def scaled_attention(**arguments: Any) -> Tensor:
    return ScaledAttention()(**arguments)


OPERATORS: dict[str, Callable[..., Any]] = {
    "flash_attention": flash_attention,
    "decode_attention": decode_attention,
    "accumulation_bracket": accumulation_bracket,
    "gap_counts": gap_counts,
    "adaptive_attention": adaptive_attention,
    "row_softmax": row_softmax,
    "ScaledAttention": scaled_attention,
}
OTHER_NAMES = {"Visibility", "interpreting", "why_unavailable"}

FLAGS = ("entropy", "winner", "differentiable", "is_causal")
GOOD: dict[str, Any] = {
    "query": normal(BATCH, HEADS, QUERIES, DIM),
    "key": normal(BATCH, KV_HEADS, KEYS, DIM),
    "value": normal(BATCH, KV_HEADS, KEYS, VALUE_DIM),
    "beta": 1.0 + normal(*ROWS).abs(),
    "visibility": Visibility(slot=1, left=3, right=1),
    "scale": 0.25,
    "softcap": 3.0,
    "sinks": normal(HEADS),
    "dropout_p": 0.5,
    "seed": torch.tensor(7),
    "entropy": True,
    "winner": True,
    "differentiable": False,
    "splits": 2,
    "thresholds": [0.5, math.inf],
    "r": 1.5,
    "floor": 0.5,
    "ceiling": 10.0,
    "scores": normal(*SCORES),
    "mask": normal(BATCH, 1, QUERIES, KEYS) > 0,
    "bias": normal(1, HEADS, 1, KEYS),
    "is_causal": True,
}
# Visibility rules, and the fields to corrupt in each.
RULES = {
    "distances": GOOD["visibility"],
    "bounds": Visibility(
        start=torch.zeros(BATCH, QUERIES, dtype=torch.int32),
        stop=torch.full((BATCH, QUERIES), KEYS - 1, dtype=torch.int32),
    ),
    "padding": Visibility(right=1, padding=torch.arange(KEYS)[None] > torch.tensor([[3], [5]])),
    "mask": Visibility(mask=GOOD["mask"]),
    "bias": Visibility(mask=normal(1, HEADS, QUERIES, KEYS)),
}
FIELDS = {
    "distances": ("slot", "left", "right"),
    "bounds": ("start", "stop"),
    "padding": ("padding",),
    "mask": ("mask",),
    "bias": ("mask",),
}


def parameters_of(name: str) -> list[str]:
    function = ScaledAttention.forward if name == "ScaledAttention" else OPERATORS[name]
    return [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]


def good(name: str, **changed: Any) -> dict[str, Any]:
    return {argument: GOOD[argument] for argument in parameters_of(name)} | changed


@functools.cache
def call_once(name: str, rule: str | None) -> None:
    """Make a valid call, so that the plan of its signature is cached."""
    OPERATORS[name](**good(name, **({} if rule is None else {"visibility": RULES[rule]})))


class Bad(NamedTuple):
    """A bad value, its error, and the argument named by the error if it is a different one that must match."""

    what: str
    value: Any
    kind: type[KernelError] = KernelTypeError
    named: str | None = None


def not_shaped(named: str | None = None, **shapes: Tensor) -> Iterator[Bad]:
    yield from (Bad(what, x, KernelArgumentError, named) for what, x in shapes.items())


def not_typed(x: Tensor, dtypes: str, named: str | None = None) -> Iterator[Bad]:
    """Values that are not strided tensors, of other dtypes, or on another device."""
    yield from (Bad("list", x.tolist()), Bad("array", x.numpy()), Bad("sparse", x.to_sparse()))
    if x.dim():
        yield Bad("nested", torch.nested.nested_tensor(list(x)))
    yield from (Bad(dtype, x.to(getattr(torch, dtype))) for dtype in f"complex64 {dtypes}".split())
    yield Bad("meta", x.to("meta"), KernelArgumentError, named)


def no_number(*out_of_range: float) -> Iterator[Bad]:
    yield from (Bad(repr(value), value, KernelArgumentError) for value in out_of_range)
    yield from (Bad(repr(value), value) for value in ("1", True, [1.0], (1.0,)))


def bad_tensors(name: str, argument: str, x: Tensor) -> Iterator[Bad]:
    """Bad values of a tensor argument, derived from a valid one."""
    softmax = name == "row_softmax"
    if argument in ("query", "key", "value", "beta", "scores") and not (softmax and argument == "beta"):
        yield Bad("None", None)
    match argument:
        case "query":
            yield from not_typed(x, "float64 int64 bool", named="key")
            yield Bad("float16", x.half(), named="key")
            yield from not_shaped(three=x[0], five=x[None], wide=normal(BATCH, HEADS, QUERIES, 257))
            yield from not_shaped("key", batch=x[:1], heads=x[:, :3], head=x[:, :1], dim=x[..., :8])
        case "key":
            yield from not_typed(x, "float64 float16 bfloat16 int64 bool")
            yield from not_shaped(three=x[0], five=x[None], batch=x[:1], dim=x[..., :8], one=x[..., :1], none=x[:, :0])
            yield from not_shaped(heads=normal(BATCH, 3, KEYS, DIM))
            if "beta" in parameters_of(name):
                yield from not_shaped("value", fewer=x[:, :, :3], more=x.repeat(1, 1, 2, 1), heads=x[:, :1])
        case "value":
            yield from not_typed(x, "float64 float16 int64 bool")
            yield from not_shaped(three=x[0], five=x[None], batch=x[:1], heads=x[:, :1], all=x.repeat(1, 2, 1, 1))
            yield from not_shaped(fewer=x[:, :, :3], more=x.repeat(1, 1, 2, 1), wide=normal(BATCH, KV_HEADS, KEYS, 257))
        case "beta":
            yield from not_typed(x, "int64 bool")
            yield from not_shaped(four=x[None], rows=x[..., :4], none=x[..., :0], heads=x[:, :2], batch=normal(3, 1, 1))
            yield from not_shaped(keys=normal(KEYS))
        case "start" | "stop":
            yield from not_typed(x, "int64 float32 bool")
            yield from not_shaped(one=x[0], three=x[None], rows=x[:, :4], row=x[:, :1], batch=x[[0, 1, 1]])
            yield from not_shaped("visibility.stop", shared=x[:1])  # together with one of another shape
            yield Bad("None", None, KernelArgumentError)
        case "padding":
            yield from not_typed(x, "uint8 float32")
            yield from not_shaped(one=x[0], three=x[None], fewer=x[:, :5], key=x[:, :1], batch=x[[0, 1, 1]])
        case "mask" | "bias":
            yield from not_typed(x, "uint8 int64 float32" if softmax and argument == "mask" else "int16 int64")
            yield from not_shaped(five=x[None], rows=x[:, :, :1].repeat(1, 1, 3, 1), keys=x[..., :3])
            yield from not_shaped(heads=x[:, :1].repeat(1, 3, 1, 1), batch=x[:1].repeat(3, 1, 1, 1))
            if not softmax:
                yield from not_shaped(three=x[0])
        case "sinks":
            yield from not_typed(x, "int64 bool")
            yield from not_shaped(two=x[None], none=x[0], one=x[:1], fewer=x[:3], more=x.repeat(2))
        case "seed":
            yield from not_typed(x, "int32 float32")
            yield from not_shaped(several=x.repeat(2), none=x.repeat(0), two=x[None, None])
            yield Bad("None", None, KernelArgumentError)
        case "scores":
            yield from not_typed(x, "float64 int64 bool", named="beta")
            yield from not_shaped(none=x[0, 0, 0, 0])
            yield from not_shaped("beta", rows=x[:, :, :3])
            yield from not_shaped("bias", keys=x[..., :3])


def bad_values(name: str, argument: str, value: Any) -> Iterator[Bad]:
    """Bad values of any argument, given a valid one."""
    if isinstance(value, Tensor):
        yield from bad_tensors(name, argument, value)
    match argument:
        case "visibility":
            yield from (Bad("None", None), Bad("tuple", tuple(Visibility())), Bad("word", "causal"))
        case "slot" | "left" | "right":
            yield from no_number(2**31, -(2**31))
            yield from (Bad("equal", float(value)), Bad("tensor", torch.tensor(1)), Bad("array", np.arange(2)))
        case "beta" if name == "row_softmax":
            yield from no_number(math.nan, math.inf)
        case "thresholds":
            yield Bad("NaN", [0.5, math.nan], KernelArgumentError)
            yield from (Bad(repr(x), x) for x in (0.5, "0.5", ["0.5"], [None], [True], torch.ones(2)))
        case "scale":
            yield from (*no_number(math.nan, math.inf, -math.inf), Bad("tensor", torch.tensor(1.0)))
        case "softcap":
            yield from no_number(0.0, -1.0, math.inf, math.nan)
        case "dropout_p":
            yield from (*no_number(-0.1, 1.0, 2, math.nan), Bad("None", None))
        case "splits":
            yield from (*no_number(0, -1), Bad("equal", 2.0))
        case "r":
            yield from no_number(0, -1.0, math.nan, math.inf)
        case "floor":
            yield from no_number(math.nan, -math.inf, GOOD["ceiling"] + 1)
        case "ceiling":
            yield from no_number(math.nan, math.inf)
    if argument in ("slot", "scale", "r", "floor", "ceiling") and name != "ScaledAttention":
        yield Bad("None", None)


def arguments_of(name: str) -> Iterator[tuple[str, str | None]]:
    """The arguments of an operator, and the fields of its visibility with their rule."""
    parameters = parameters_of(name)
    yield from ((argument, None) for argument in parameters if argument not in FLAGS)
    if "visibility" in parameters:
        yield from ((field, rule) for rule, fields in FIELDS.items() for field in fields)


class Watched(TorchDispatchMode):
    """A no-op mode: calls inside it go through the torch.library operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def assert_names(refusal: KernelError, argument: str, what: str) -> None:
    """The message quotes the argument and its value, shape, dtype, layout or device, and the accepted values."""
    seen = r"( of shape \(.*\)| of torch\.\w+| of layout [\w.]+| on \w+|=.+)"
    assert re.match(rf"{re.escape(argument)}{seen} is not accepted: expected .", str(refusal)), f"{what}: {refusal}"


ARGUMENTS = [(name, *argument) for name in OPERATORS for argument in arguments_of(name)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "argument", "rule"), ARGUMENTS)
def test_a_bad_argument_is_refused_by_name_also_after_a_good_call(name: str, argument: str, rule: str | None) -> None:
    call_once(name, rule)
    cases = list(bad_values(name, argument, GOOD[argument] if rule is None else getattr(RULES[rule], argument)))
    assert cases, "no bad value of this argument is known"
    for bad, mode in itertools.product(cases, (contextlib.nullcontext, Watched)):
        changed = (
            {argument: bad.value} if rule is None else {"visibility": RULES[rule]._replace(**{argument: bad.value})}
        )
        with mode(), pytest.raises(bad.kind) as refusal:  # noqa: PT012 – to say which is accepted
            OPERATORS[name](**good(name, **changed))
            pytest.fail(f"{bad.what} is accepted")
        assert_names(refusal.value, bad.named or (argument if rule is None else f"visibility.{argument}"), bad.what)


def test_every_public_operator_is_among_them() -> None:
    errors = {name for name in attnscale_kernels.__all__ if name.endswith("Error")}
    assert set(attnscale_kernels.__all__) - errors - OTHER_NAMES == OPERATORS.keys() - {"ScaledAttention"}


@pytest.mark.parametrize("field", ["left", "right"])
def test_distances_beside_bounds_are_refused(field: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"visibility.{field}=1 is not accepted"):
        flash_attention(**good("flash_attention", visibility=RULES["bounds"]._replace(**{field: 1})))


@pytest.mark.parametrize("name", ["flash_attention", "decode_attention", "gap_counts"])
def test_one_bound_alone_is_refused_also_after_a_call_without_any(name: str) -> None:
    OPERATORS[name](**good(name, visibility=Visibility()))
    for field, missing in (("start", "stop"), ("stop", "start")):
        alone = Visibility(**{field: getattr(RULES["bounds"], field)})
        with pytest.raises(KernelArgumentError, match=f"visibility.{missing}=None is not accepted"):
            OPERATORS[name](**good(name, visibility=alone))


@pytest.mark.parametrize("argument", ["value", "sinks", "seed", "dropout_p"])
def test_adaptive_attention_is_refused_before_anything_is_launched(
    argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscale_kernels.gaps.op.gap_bracket_op", None)
    with pytest.raises(KernelTypeError, match=argument):
        adaptive_attention(**good("adaptive_attention", **{argument: "no"}))


def test_a_cache_that_grows_is_checked_at_every_length() -> None:
    # Decode steps of different lengths share a plan; padding, mask and values must match the length.
    query = normal(1, HEADS, 1, DIM)
    for field, x in (("padding", torch.zeros(1, KEYS, dtype=torch.bool)), ("mask", torch.zeros(1, 1, 1, KEYS))):
        for keys in (KEYS, KEYS + 1):
            cache = normal(1, KV_HEADS, keys, DIM)
            arguments = {"query": query, "key": cache, "value": cache, "beta": torch.ones(1), "scale": 0.25}
            decode_attention(**arguments, visibility=Visibility())
            expected = contextlib.nullcontext() if keys == KEYS else pytest.raises(KernelArgumentError, match=field)
            with expected:
                decode_attention(**arguments, visibility=Visibility(**{field: x}))
            with pytest.raises(KernelArgumentError, match="value of shape"):
                decode_attention(**arguments | {"value": cache[:, :, 1:]}, visibility=Visibility())


# Accepted arguments.

BETAS = [shape for axes in range(4) for shape in itertools.product(*((1, extent) for extent in ROWS[3 - axes :]))]


@pytest.mark.parametrize("shape", BETAS, ids=str)
def test_beta_of_any_shape_that_broadcasts_is_accepted_and_gets_its_gradient(shape: tuple[int, ...]) -> None:
    arguments = {name: GOOD[name] for name in ("query", "key", "value", "scale", "sinks", "visibility")}
    beta = (0.5 + normal(*shape).abs()).requires_grad_()
    whole = beta.detach().expand(ROWS).contiguous().requires_grad_()
    found, expected = (flash_attention(**arguments, beta=x) for x in (beta, whole))
    assert torch.equal(found.out, expected.out)
    (gradient,), (wanted,) = (
        torch.autograd.grad(result.out.square().sum(), x) for result, x in ((found, beta), (expected, whole))
    )
    torch.testing.assert_close(gradient, wanted.sum_to_size(shape))
    with torch.no_grad():
        assert torch.equal(*(decode_attention(**arguments, beta=x).out for x in (beta, whole)))
        assert torch.equal(*(row_softmax(GOOD["scores"], x).weights for x in (beta, whole)))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, KEYS), (BATCH, 1, QUERIES, 1), (1, 1, 1, 1), (BATCH, HEADS, 1, 1)], ids=str
)
def test_any_axis_of_a_mask_may_be_broadcast(
    shape: tuple[int, ...], listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "LEAST_SCORES", 0 if listed else 2**40)
    for mask in (normal(*shape) > 0, normal(*shape)):
        results = []
        for given_mask in (mask, mask.expand(SCORES).contiguous()):
            leaves = [GOOD[name].clone().requires_grad_() for name in ("query", "key", "value", "beta")]
            found = flash_attention(*leaves, Visibility(right=0, mask=given_mask), scale=0.25)
            gradients = torch.autograd.grad(found.out.square().sum(), leaves)
            bracket = accumulation_bracket(leaves[0], leaves[1], Visibility(mask=given_mask), scale=0.25)
            with torch.no_grad():
                decoded = decode_attention(*leaves, Visibility(mask=given_mask), scale=0.25)
            results.append((found.out, found.lse, *gradients, *bracket, decoded.out))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


# An oracle, and arguments with one of another shape or dtype.


def shown(visibility: Visibility, queries: int, keys: int) -> Tensor:
    """The visibility, broadcastable to [B, H, Tq, Tk]."""
    own, slots = visibility.slot + torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if visibility.start is not None and visibility.stop is not None:
        seen = (slots >= visibility.start[:, None, :, None]) & (slots < visibility.stop[:, None, :, None])
    if visibility.left is not None:
        seen = seen & (slots >= own - visibility.left)
    if visibility.right is not None:
        seen = seen & (slots <= own + visibility.right)
    if visibility.padding is not None:
        seen = seen & ~visibility.padding[:, None, None]
    if visibility.mask is not None:
        seen = seen & (visibility.mask if visibility.mask.dtype == torch.bool else visibility.mask > -1e4)
    return seen


def raw_scores(query: Tensor, key: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """[B, H, Tq, Tk] in fp64, −∞ for hidden keys."""
    raw = scale * query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    if visibility.mask is not None and visibility.mask.dtype != torch.bool:
        raw = raw + visibility.mask.double()
    return raw.masked_fill(~shown(visibility, query.shape[2], key.shape[2]), -math.inf)


def softmax_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, 0 in rows without visible keys, and lse."""
    lse = logits.logsumexp(-1)
    return (logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp(), lse


def check_gaps(query: Tensor, key: Tensor, visibility: Visibility) -> None:
    counts = gap_counts(query, key, visibility, [math.inf], scale=0.25)
    top = accumulation_bracket(query, key, visibility, scale=0.25).top
    raw = raw_scores(query, key, visibility, 0.25)
    assert torch.equal(counts[..., 0], (raw > -math.inf).sum(-1).int())
    nothing = torch.full((*raw.shape[:3], 1), -math.inf, dtype=torch.float64)
    torch.testing.assert_close(top.double(), torch.cat([raw, nothing], -1).amax(-1), rtol=1e-5, atol=1e-5)


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, sinks: Tensor, visibility: Visibility
) -> None:
    results = [
        attend(query, key, value, beta, visibility, scale=0.25, sinks=sinks)
        for attend in (flash_attention, decode_attention)
    ]
    raw = raw_scores(query, key, visibility, 0.25)
    logits = (raw * beta.double().expand(query.shape[:3])[..., None]).masked_fill(raw == -math.inf, -math.inf)
    sink = sinks.double()[:, None, None].expand(*query.shape[:3], 1)
    weights, lse = softmax_of(torch.cat([logits, sink], -1))
    expected = weights[..., :-1] @ value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)
    for found in results:
        torch.testing.assert_close(found.out.double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-5)


def check_softmax(scores: Tensor, beta: Tensor, mask: Tensor, bias: Tensor) -> None:
    found = row_softmax(scores, beta, mask=mask, bias=bias)
    logits = (scores.double() + bias.double()) * beta.double().expand(scores.shape[:-1])[..., None]
    weights, lse = softmax_of(logits.masked_fill(~mask.expand(scores.shape), -math.inf))
    rounding = torch.finfo(scores.dtype).eps  # for weights, in the dtype of the scores
    torch.testing.assert_close(found.weights.double(), weights, rtol=max(1e-4, rounding), atol=1e-5)
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-4, atol=1e-5)


CHECKS: dict[str, Callable[..., None]] = {"gaps": check_gaps, "attention": check_attention, "softmax": check_softmax}
DTYPES = (torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool)


class Change(NamedTuple):
    """An argument, or a field of the visibility, that gets another shape and dtype."""

    check: str
    rule: str
    argument: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@st.composite
def changes(draw: st.DrawFn) -> Change:
    check, rule = draw(st.sampled_from(sorted(CHECKS))), draw(st.sampled_from(sorted(RULES)))
    names = [*inspect.signature(CHECKS[check]).parameters]
    if "visibility" in names:
        names = [*names[:-1], *(field for field in FIELDS[rule] if field in ("start", "stop", "padding", "mask"))]
    argument = draw(st.sampled_from(names))
    x = getattr(RULES[rule], argument) if argument in FIELDS[rule] and check != "softmax" else GOOD[argument]
    shape, axes = list(x.shape), draw(st.sets(st.integers(0, x.dim() - 1), max_size=2))
    for axis in axes:
        shape[axis] = draw(st.sampled_from([1, 0, x.shape[axis] - 1, x.shape[axis] + 1, 2 * x.shape[axis]]))
    left_out = draw(st.sampled_from([0, 0, 0, 1, 2]))
    return Change(check, rule, argument, tuple(shape[left_out:]), draw(st.sampled_from([*[x.dtype] * 6, *DTYPES])))


@settings(max_examples=100, deadline=None)
@given(changes())
def test_a_changed_argument_is_refused_or_taken_for_what_it_is(change: Change) -> None:
    check, x = CHECKS[change.check], (3 * normal(*change.shape)).abs().to(change.dtype)
    arguments: dict[str, Any] = {name: GOOD[name] for name in inspect.signature(check).parameters}
    if "beta" in arguments:
        arguments["beta"] = GOOD["beta"][0, :, :1]  # leaves the other extents free
    if "visibility" in arguments:
        arguments["visibility"] = RULES[change.rule]
    if change.argument in arguments:
        arguments[change.argument] = x
    else:
        arguments["visibility"] = RULES[change.rule]._replace(**{change.argument: x})
    with contextlib.suppress(KernelError):
        check(**arguments)


# torch.library operators, torch.compile, and machines without a GPU.


def flash_operands(**changed: Any) -> FlatAttention:
    arguments = {name: GOOD[name] for name in ("query", "key", "value", "beta")} | changed
    return FlatAttention.of(**arguments, visibility=Visibility(), scale=0.25, softcap=None)


def refusing_operators() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Operator calls with one bad argument, by its name."""
    value, rows, out = GOOD["value"], normal(*ROWS), normal(*ROWS, VALUE_DIM)
    yield "value", lambda: flash_forward_op(*flash_operands(value=value[:, :, :3]), False, False, False)
    for bad in ("gradient", "out", "lse"):
        given_results = {"gradient": out, "out": out, "lse": rows}
        given_results[bad] = given_results[bad][:, :, :3]
        gradient, forward, lse = given_results.values()
        yield bad, functools.partial(flash_backward_op, *flash_operands(), gradient, forward, lse, True, None, None)
    scores, beta = GOOD["scores"], GOOD["beta"]
    for bad in ("gradient", "weights", "scores"):
        matrices = {"gradient": scores, "weights": scores, "scores": scores} | {bad: scores[..., :3]}
        named = "gradient" if bad == "weights" else bad
        gradient, weights, given_scores = matrices.values()
        yield named, functools.partial(softmax_backward_op, gradient, weights, beta, given_scores, None, False)


@pytest.mark.parametrize("fake", [False, True])
def test_operators_and_their_fakes_refuse_the_same(fake: bool) -> None:
    for name, call in refusing_operators():
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
        with mode, pytest.raises(KernelArgumentError, match=rf"{name} of shape \(.*\) is not accepted"):
            call()


def test_a_compiled_call_refuses_the_same() -> None:
    def attend(value: Tensor, scale: float) -> Tensor:
        return flash_attention(GOOD["query"], GOOD["key"], value, GOOD["beta"], Visibility(), scale=scale).out

    torch._dynamo.reset()
    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for scale in (0.25, 0.5, 0.75):  # the third is not constant in the graph
        assert torch.equal(whole(GOOD["value"], scale), attend(GOOD["value"], scale))
    with pytest.raises(
        TorchDynamoException, match="KernelArgumentError"
    ):  # raised by torch, which found no handler for our error
        whole(GOOD["value"][:, :, :3], 0.25)
    broken = torch.compile(attend, backend="aot_eager")
    with pytest.raises(KernelArgumentError, match="value of shape"):
        broken(GOOD["value"][:, :, :3], 0.25)
    with pytest.raises(KernelArgumentError, match="scale=nan"):
        broken(GOOD["value"], math.nan)


WITHOUT_GPU = """
import torch
import attnscale_kernels as kernels

x, beta, seen = torch.zeros(1, 1, 16, 16), torch.ones(1), kernels.Visibility()
calls = {
    "flash_attention": lambda: kernels.flash_attention(x, x, x, beta, seen, scale=1.0),
    "decode_attention": lambda: kernels.decode_attention(x, x, x, beta, seen, scale=1.0),
    "accumulation_bracket": lambda: kernels.accumulation_bracket(x, x, seen, scale=1.0),
    "gap_counts": lambda: kernels.gap_counts(x, x, seen, [1.0], scale=1.0),
    "adaptive_attention": lambda: kernels.adaptive_attention(x, x, x, seen, r=1.5, floor=0.0, ceiling=9.0, scale=1.0),
    "row_softmax": lambda: kernels.row_softmax(x),
    "ScaledAttention": lambda: kernels.layers.ScaledAttention()(x, x, x, beta),
}
for name, call in calls.items():
    try:
        call()
    except kernels.KernelUnavailableError as error:
        print(name, error)
"""


def test_without_a_gpu_every_operator_hints_at_the_interpreter() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_GPU], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert lines.keys() == OPERATORS.keys()
    for line in lines.values():
        assert line.startswith("triton kernels need a CUDA or ROCm device, not cpu")
        assert "TRITON_INTERPRET=1" in line
