"""`attnscale.MultiheadAttention` does what `torch.nn.MultiheadAttention` does, and scales by what each row sees."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attnscale
from attnscale.errors import ArgumentError, ArgumentTypeError

N, L, S, E, H = 2, 5, 6, 8, 2
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": ("batch_first", "sequence_first", "unbatched"),
    "attends": ("self", "cross", "other_widths"),
    "weights": ("no_weights", "mean_weights", "head_weights"),
    "bias": ("bias", "no_bias"),
    "bias_kv": ("no_bias_kv", "bias_kv"),
    "zero_attn": ("no_zero_attn", "zero_attn"),
    "mask": ("no_mask", "bool_mask", "float_mask", "bool_mask_per_head", "causal_hint"),
    "padding": ("no_padding", "bool_padding", "float_padding"),
    "mode": ("train", "eval", "inference"),
}


class Case(NamedTuple):
    layout: str
    attends: str
    weights: str
    bias: str
    bias_kv: str
    zero_attn: str
    mask: str
    padding: str
    mode: str


def comparable(case: Case) -> bool:
    """Given the hint and no weights, torch drops the mask and with it hides the keys that its options append."""
    appended = case.bias_kv == "bias_kv" or case.zero_attn == "zero_attn"
    return not (
        case.mask == "causal_hint" and case.padding == "no_padding" and case.weights == "no_weights" and appended
    )


EVERY_CASE = [case for case in itertools.starmap(Case, itertools.product(*FACTORS.values())) if comparable(case)]
CASES = random.Random(0).sample(EVERY_CASE, 200)


class Twins(NamedTuple):
    theirs: nn.MultiheadAttention
    ours: attnscale.MultiheadAttention


def twins(*, policy: Any = "constant", dtype: torch.dtype = torch.float64, **options: Any) -> Twins:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = attnscale.MultiheadAttention(E, H, dtype=dtype, policy=policy, **options)
    ours.load_state_dict(theirs.state_dict(), strict=policy == "constant")
    return Twins(theirs, ours)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hidden(*shape: int) -> Tensor:
    """A bool mask that hides about a third, and never the first key."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.35
    mask[..., 0] = False
    return mask


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    batch = () if case.layout == "unbatched" else (N,)
    query = tokens(*batch, L, E, seed=1)
    if case.attends == "self":
        key = value = query
    elif case.attends == "cross":
        key = value = tokens(*batch, S, E, seed=3)
    else:
        key, value = tokens(*batch, S, E + 1, seed=3), tokens(*batch, S, E + 2, seed=4)
    if case.layout == "sequence_first":
        moved = {id(x): x.transpose(0, 1).contiguous() for x in (query, key, value)}
        query, key, value = (moved[id(x)] for x in (query, key, value))
    return query, key, value


def masks(case: Case) -> dict[str, Any]:
    batch = 1 if case.layout == "unbatched" else N
    keys = L if case.attends == "self" else S
    given: dict[str, Any] = {}
    if case.mask == "bool_mask":
        given["attn_mask"] = hidden(L, keys)
    elif case.mask == "bool_mask_per_head":
        given["attn_mask"] = hidden(batch * H, L, keys)
    elif case.mask == "float_mask":
        given["attn_mask"] = tokens(L, keys, seed=5).masked_fill(hidden(L, keys), -math.inf)
    elif case.mask == "causal_hint":
        given |= {"attn_mask": torch.ones(L, keys, dtype=torch.bool).triu(1), "is_causal": True}
    if case.padding != "no_padding":
        padding = hidden(batch, keys) if batch > 1 else hidden(keys)
        if case.padding == "float_padding":
            padding = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, -math.inf)
        given["key_padding_mask"] = padding
    return given


def run(module: nn.Module, case: Case) -> dict[str, Tensor]:
    """Everything a case produces: output, weights and the gradient of every input and parameter."""
    module.train(case.mode == "train")
    query, key, value = inputs(case)
    leaves = {id(x): x.requires_grad_(case.mode != "inference") for x in (query, key, value)}
    with torch.set_grad_enabled(case.mode != "inference"):
        output, weights = module(
            query,
            key,
            value,
            need_weights=case.weights != "no_weights",
            average_attn_weights=case.weights != "head_weights",
            **masks(case),
        )
    produced = {"output": output.detach()}
    loss = (output * tokens(*output.shape, seed=6)).sum()
    if weights is not None:
        produced["weights"] = weights.detach()
        loss = loss + (weights * tokens(*weights.shape, seed=7)).sum()
    assert (weights is None) == (case.weights == "no_weights")
    if case.mode != "inference":
        named = dict(module.named_parameters()) | {f"input {index}": x for index, x in enumerate(leaves.values())}
        gradients = torch.autograd.grad(loss, list(named.values()))
        produced |= {f"gradient of {name}": gradient for name, gradient in zip(named, gradients, strict=True)}
    return produced


def test_the_cases_cover_every_pair_of_options() -> None:
    def pairs(cases: list[Case]) -> set[Any]:
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    assert pairs(CASES) == pairs(EVERY_CASE)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_agrees_with_torch_in_outputs_weights_and_gradients(case: Case) -> None:
    theirs, ours = twins(
        batch_first=case.layout == "batch_first",
        bias=case.bias == "bias",
        add_bias_kv=case.bias_kv == "bias_kv",
        add_zero_attn=case.zero_attn == "zero_attn",
        dropout=0.0 if case.mode == "train" else 0.3,
        **({"kdim": E + 1, "vdim": E + 2} if case.attends == "other_widths" else {}),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of masks of different dtypes; ours must not
        expected = run(theirs, case)
    produced = run(ours, case)
    assert produced.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            produced[name], expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("layout", ["batch_first", "sequence_first", "unbatched"])
@pytest.mark.parametrize("mask", ["bool", "float", "per_head", "bool_padding", "float_padding"])
def test_a_row_that_sees_nothing_gives_zeros_where_torch_gives_nan(mask: str, layout: str, need_weights: bool) -> None:
    ours = twins(batch_first=layout == "batch_first").ours
    batch = 1 if layout == "unbatched" else N
    x = tokens(*(() if layout == "unbatched" else (N,)), L, E)
    x = (x.transpose(0, 1) if layout == "sequence_first" else x).requires_grad_()
    blind = torch.zeros(batch, L, dtype=torch.bool)  # which rows see nothing
    given: dict[str, Tensor] = {}
    if mask.endswith("padding"):
        blind[-1] = True
        padding = blind if mask == "bool_padding" else torch.zeros(batch, L).double().masked_fill(blind, -math.inf)
        given["key_padding_mask"] = padding[0] if layout == "unbatched" else padding
    else:
        blind[:, 2] = True
        hide = torch.zeros(L, L, dtype=torch.bool).index_fill(0, torch.tensor(2), True)
        if mask == "per_head":
            given["attn_mask"] = hide.expand(batch * H, L, L)
        else:
            given["attn_mask"] = hide if mask == "bool" else torch.zeros(L, L).double().masked_fill(hide, -math.inf)

    output, weights = ours(x, x, x, need_weights=need_weights, average_attn_weights=False, **given)

    output.square().sum().backward()
    rows = output.reshape(1, L, E) if layout == "unbatched" else output
    rows = rows.transpose(0, 1) if layout == "sequence_first" else rows
    torch.testing.assert_close(rows[blind], ours.out_proj.bias.expand_as(rows[blind]))
    assert not torch.isclose(rows[~blind], ours.out_proj.bias).all(-1).any()
    if weights is not None:
        per_row = weights.reshape(batch, H, L, L).transpose(1, 2)
        assert torch.count_nonzero(per_row[blind]) == 0
        torch.testing.assert_close(per_row[~blind].sum(-1), torch.ones_like(per_row[~blind].sum(-1)))
    for tensor in (x, *ours.parameters()):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()


def test_the_constructor_is_that_of_torch_with_a_policy() -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    theirs, ours = parameters(nn.MultiheadAttention.__init__), parameters(attnscale.MultiheadAttention.__init__)
    assert ours == [*theirs, ("policy", inspect.Parameter.KEYWORD_ONLY, "constant")]
    assert parameters(attnscale.MultiheadAttention.forward) == parameters(nn.MultiheadAttention.forward)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 3, "vdim": 5}], ids=str)
@pytest.mark.parametrize("policy", ["constant", "log", {"name": "llama4"}])
def test_state_dicts_load_strictly_in_both_directions(policy: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(E, H, **options), attnscale.MultiheadAttention(E, H, policy=policy, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    wanted = {name: torch.randn_like(tensor) for name, tensor in theirs.state_dict().items()}
    theirs.load_state_dict(wanted, strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    for module in (ours, theirs):
        assert all(torch.equal(module.state_dict()[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "appended", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["none", "bias_kv", "zero"]
)
@pytest.mark.parametrize(
    "mask", ["none", "bool", "float", "padding", "bool+padding", "causal", "hint", "causal+padding"]
)
def test_a_length_law_multiplies_the_scores_by_the_logarithm_of_what_a_row_sees(
    mask: str, appended: dict[str, bool], need_weights: bool
) -> None:
    ours = twins(policy="log", batch_first=True, **appended).ours
    x, memory = tokens(N, L, E, seed=1), tokens(N, S, E, seed=3)
    given: dict[str, Any] = {}
    hide, add = torch.zeros(N, L, S, dtype=torch.bool), torch.zeros(L, S, dtype=torch.float64)
    if "bool" in mask:
        given["attn_mask"] = hidden(L, S)
        hide |= given["attn_mask"]
    if mask == "float":
        add = tokens(L, S, seed=5)
        given["attn_mask"] = add.masked_fill(hidden(L, S), -math.inf)
        hide |= hidden(L, S)
    if "padding" in mask:
        given["key_padding_mask"] = hidden(N, S)
        hide |= given["key_padding_mask"][:, None]
    if "causal" in mask or mask == "hint":
        given["is_causal"] = True
        hide |= torch.ones(L, S, dtype=torch.bool).triu(1)
    if mask == "hint":
        given["attn_mask"] = torch.ones(L, S, dtype=torch.bool).triu(1)

    output, weights = ours(x, memory, memory, need_weights=need_weights, **given)

    # Written out, from the weights of the projections alone.
    w_q, w_k, w_v = ours.in_proj_weight.chunk(3)
    b_q, b_k, b_v = ours.in_proj_bias.chunk(3)
    q, k, v = x @ w_q.T + b_q, memory @ w_k.T + b_k, memory @ w_v.T + b_v
    if "add_bias_kv" in appended:
        k, v = torch.cat([k, ours.bias_k.expand(N, 1, E)], 1), torch.cat([v, ours.bias_v.expand(N, 1, E)], 1)
    if "add_zero_attn" in appended:
        k, v = (torch.cat([y, torch.zeros(N, 1, E, dtype=y.dtype)], 1) for y in (k, v))
    extra = k.shape[1] - S
    hide, add = torch.cat([hide, hide.new_zeros(N, L, extra)], -1), torch.cat([add, add.new_zeros(L, extra)], -1)
    beta = (~hide).sum(-1, keepdim=True).clamp(min=2).double().log()  # ln 1 := ln 2
    heads, shares = [], []
    for head in range(H):
        part = slice(head * E // H, (head + 1) * E // H)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(E // H) + add
        shares.append((beta * scores).masked_fill(hide, -math.inf).softmax(-1))
        heads.append(shares[-1] @ v[..., part])
    expected = torch.cat(heads, -1) @ ours.out_proj.weight.T + ours.out_proj.bias
    # β is rounded to fp32 once, so agreement is to fp32.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    if need_weights:
        torch.testing.assert_close(weights, torch.stack(shares).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "appended", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["none", "bias_kv", "zero"]
)
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_is_causal_needs_no_mask_and_agrees_with_one(policy: str, appended: dict[str, bool]) -> None:
    ours, x = twins(policy=policy, batch_first=True, **appended).ours, tokens(N, L, E)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = ours(x, x, x, attn_mask=mask)[0]
    for need_weights, attn_mask in itertools.product((True, False), (None, mask)):
        output = ours(x, x, x, is_causal=True, attn_mask=attn_mask, need_weights=need_weights)[0]
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    later = x.clone()
    later[:, -1] += 1.0
    changed = ours(later, later, later, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(changed[:, :-1], expected[:, :-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [True, False])
def test_parameters_of_a_learned_policy_are_saved_and_get_gradients(need_weights: bool) -> None:
    ours, x = attnscale.MultiheadAttention(E, H, batch_first=True, policy="ssmax"), tokens(N, L, E).float()
    assert set(ours.state_dict()) - set(nn.MultiheadAttention(E, H).state_dict()) == {"policy.s"}
    assert ours.policy.s.shape == (H,)
    ours(x, x, x, is_causal=True, need_weights=need_weights)[0].square().sum().backward()
    assert ours.policy.s.grad is not None
    assert (ours.policy.s.grad != 0).all()


def test_each_module_has_a_policy_of_its_own() -> None:
    policy = attnscale.build_policy("ssmax", num_heads=H)
    first, second = (attnscale.MultiheadAttention(E, H, policy=policy) for _ in range(2))
    assert len({id(first.policy.s), id(second.policy.s), id(policy.s)}) == 3


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_full_dropout_leaves_the_bias_of_the_output_in_training_and_nothing_changes_in_evaluation(
    policy: str, need_weights: bool
) -> None:
    ours, x = twins(policy=policy, dropout=1.0, batch_first=True).ours, tokens(N, L, E)
    output = ours.train()(x, x, x, need_weights=need_weights)[0]
    assert torch.equal(output, ours.out_proj.bias.expand_as(output))
    without = twins(policy=policy, dropout=0.0, batch_first=True).ours
    assert torch.equal(
        ours.eval()(x, x, x, need_weights=need_weights)[0], without(x, x, x, need_weights=need_weights)[0]
    )


@pytest.mark.parametrize("policy", ["constant", "log"])
def test_dropout_in_training_drops_weights_and_enlarges_the_others(policy: str) -> None:
    ours, x = twins(policy=policy, dropout=0.5, batch_first=True).ours, tokens(N, L, E)
    whole = ours.eval()(x, x, x, average_attn_weights=False)[1]
    torch.manual_seed(0)
    dropped = ours.train()(x, x, x, average_attn_weights=False)[1]
    kept = dropped != 0
    assert 0.2 < kept.double().mean() < 0.8
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_its_sequences_one_by_one(layout) -> None:
    ours = attnscale.MultiheadAttention(E, H, batch_first=True, policy="log").eval()
    sequences = [torch.randn(3, E), torch.randn(2, E)]
    nested = torch.nested.nested_tensor(sequences, layout=layout)
    found, weights = ours(nested, nested, nested)
    assert found.is_nested
    assert found.layout == layout
    for got, rows, x in zip(found.unbind(), weights, sequences, strict=True):
        alone, alone_weights = ours(x, x, x)
        torch.testing.assert_close(got, alone)
        torch.testing.assert_close(rows[: len(x), : len(x)], alone_weights)
    with pytest.raises(ArgumentTypeError, match="nested tensor"):
        ours(nested, nested, nested, key_padding_mask=torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(("mask", "shape"), [("attn_mask", (L, L)), ("key_padding_mask", (N, L))])
def test_integer_masks_are_refused_by_name(mask: str, shape: tuple[int, int]) -> None:
    x = torch.zeros(N, L, E)
    with pytest.raises(ArgumentTypeError, match=f"{mask} of torch.int64 is not accepted"):
        attnscale.MultiheadAttention(E, H, batch_first=True)(x, x, x, **{mask: torch.zeros(shape, dtype=torch.int64)})
    with pytest.raises(AssertionError):  # as torch's module raises
        attnscale.MultiheadAttention(E, H, batch_first=True)(x, x, x, **{mask: torch.zeros(shape, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("shapes", "masks"),
    [
        (((N, L, E), (L, E), (L, E)), {}),
        (((L, E), (N, L, E), (N, L, E)), {}),
        (((1, N, L, E),) * 3, {}),
        (((E,),) * 3, {}),
        (((N, L, E), (N, L, E + 1), (N, L, E)), {}),
        (((N, L, E), (N + 1, L, E), (N + 1, L, E)), {}),
        (((N, L, E), (1, L, E), (1, L, E)), {}),
        (((N, L, E), (N, S, E), (N, S + 1, E)), {}),
        (((N, L, E),) * 3, {"attn_mask": (L, L + 1)}),
        (((N, L, E),) * 3, {"attn_mask": (N, L, L)}),
        (((N, L, E),) * 3, {"attn_mask": (3, L, L)}),
        (((N, L, E),) * 3, {"attn_mask": (N, H, L, L)}),
        (((N, L, E),) * 3, {"attn_mask": (L,)}),
        (((N, L, E),) * 3, {"key_padding_mask": (N, L + 1)}),
        (((N, L, E),) * 3, {"key_padding_mask": (N + 1, L)}),
        (((N, L, E),) * 3, {"key_padding_mask": (L,)}),
        (((L, E),) * 3, {"key_padding_mask": (1, L)}),
        (((L, E),) * 3, {"attn_mask": (H + 1, L, L)}),
        (((L, E),) * 3, {"attn_mask": (L,)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_shapes_that_torch_refuses_are_refused_by_name(shapes: Any, masks: dict[str, Any], kind: torch.dtype) -> None:
    given = {name: torch.zeros(shape, dtype=kind) for name, shape in masks.items()}
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises((AssertionError, RuntimeError)) as torchs:
        nn.MultiheadAttention(E, H, batch_first=True)(*tensors, **given)
    with pytest.raises(ArgumentError, match="|".join(masks) or "query|key|value") as ours:
        attnscale.MultiheadAttention(E, H, batch_first=True)(*tensors, **given)
    assert isinstance(ours.value, torchs.type)
    words = re.search("xpected `.*?(?= but got|$)", str(torchs.value))
    assert words is None or words[0] in str(ours.value)  # torch's own tests look for them


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError):
        nn.MultiheadAttention(9, 2)
    with pytest.raises(
        ArgumentError, match="embed_dim=9 is not accepted: expected a multiple of num_heads=2"
    ) as raised:
        attnscale.MultiheadAttention(9, 2)
    assert isinstance(raised.value, AssertionError)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((0, 1), ArgumentError), ((8, -2), ArgumentError), ((8.0, 2), ArgumentTypeError), ((8, True), ArgumentTypeError)],
)
def test_widths_and_heads_are_ints_of_at_least_one(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"(embed_dim|num_heads)=.* is not accepted: expected an int >= 1"):
        attnscale.MultiheadAttention(*arguments)


def test_widths_and_heads_may_be_numbers_of_numpy() -> None:
    sizes = {"kdim": np.int64(3), "vdim": np.int32(5), "dropout": np.float32(0.5)}
    ours = attnscale.MultiheadAttention(np.int64(E), np.int64(H), batch_first=True, policy="ssmax", **sizes)
    q, k, v = (torch.randn(N, L, width) for width in (E, 3, 5))
    assert ours(q, k, v, is_causal=True)[0].shape == (N, L, E)
    assert ours.policy.num_heads == H


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("layout", ["batch_first", "sequence_first"])
@pytest.mark.parametrize("separate", [False, True])
def test_a_half_bias_of_the_projections_in_a_double_module_is_taken(
    layout: str, separate: bool, need_weights: bool
) -> None:
    widths = {"kdim": E + 1, "vdim": E + 2} if separate else {}
    theirs, ours = twins(batch_first=layout == "batch_first", **widths)
    bias = theirs.in_proj_bias.detach().half()
    for module in (theirs, ours):
        module.in_proj_bias = nn.Parameter(bias.double())
    q, k, v = (tokens(N, L, width, seed=width) for width in (E, E + separate, E + 2 * separate))
    expected = theirs(q, k, v)[0]
    ours.in_proj_bias = nn.Parameter(bias)
    output = ours(q, k, v, need_weights=need_weights)[0]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert ours.in_proj_bias.grad.dtype == torch.float16


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "key_padding_mask"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x.to_sparse(), "as a torch.sparse_coo tensor is not accepted: expected a dense one"),
        (lambda x: x.to(torch.float8_e4m3fn), "of torch.float8_e4m3fn is not accepted"),
    ],
    ids=["sparse", "float8"],
)
def test_sparse_tensors_and_narrow_dtypes_are_refused_by_name(name: str, change: Any, sentence: str) -> None:
    given = {"query": tokens(N, L, E), "key": tokens(N, S, E), "value": tokens(N, S, E)}
    given |= {"attn_mask": torch.zeros(L, S), "key_padding_mask": torch.zeros(N, S)}
    given[name] = change(given[name])
    with pytest.raises(ArgumentTypeError, match=f"{name} {sentence}") as raised:
        twins(batch_first=True).ours(**given)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("policy", ["constant", "log", "ssmax"])
def test_compiles_without_a_graph_break(policy: str, need_weights: bool) -> None:
    torch.compiler.reset()
    ours, x = twins(policy=policy, batch_first=True).ours, tokens(N, L, E)
    mask, padding = hidden(L, L), hidden(N, L)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for given in ({"is_causal": True}, {"attn_mask": mask, "key_padding_mask": padding}):
        expected, produced = (module(x, x, x, need_weights=need_weights, **given)[0] for module in (ours, compiled))
        torch.testing.assert_close(produced, expected, rtol=1e-5, atol=1e-6)
        gradients = (torch.autograd.grad(y.square().sum(), list(ours.parameters())) for y in (produced, expected))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=["plain", "bias_kv", "zero"]
)
@pytest.mark.parametrize("policy", ["constant", "log", "ssmax"])
def test_autocast_computes_in_bfloat16_and_keeps_gradients_in_float32(
    policy: str, options: dict[str, bool], need_weights: bool
) -> None:
    ours, x = twins(policy=policy, dtype=torch.float32, batch_first=True, **options).ours, tokens(N, L, E).float()
    exact = ours(x, x, x, need_weights=need_weights)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(x, x, x, need_weights=need_weights)[0]
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=0.1, atol=0.1)
    output.float().square().sum().backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 5}], ids=["packed", "separate"])
def test_parameters_can_be_reset_as_in_torch(options: dict[str, int]) -> None:
    theirs, ours = nn.MultiheadAttention(E, H, **options), attnscale.MultiheadAttention(E, H, **options)
    for module in (theirs, ours):
        torch.manual_seed(7)
        module._reset_parameters()
    for name, parameter in theirs.named_parameters():
        if name != "out_proj.weight":  # drawn once, on construction
            assert torch.equal(ours.get_parameter(name), parameter), name


@pytest.mark.parametrize("policy", ["constant", "log"])
def test_an_encoder_layer_in_evaluation_uses_the_policy_of_the_attention_put_into_it(policy: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    x = tokens(N, L, E).float()
    stock = layer.eval()(x)
    ours = attnscale.MultiheadAttention(E, H, batch_first=True, policy=policy)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    with torch.no_grad():
        evaluated = layer.eval()(x)
    torch.testing.assert_close(evaluated, layer.train()(x), rtol=1e-4, atol=1e-5)
    assert torch.allclose(evaluated, stock, rtol=1e-4, atol=1e-5) == (policy == "constant")
