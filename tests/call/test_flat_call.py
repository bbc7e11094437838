"""`FlatCall`, the flat form in which operators take a call: nothing is lost, and names stay with their values."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from attnscale import StatsRequest, build_policy
from attnscale.attention import bind
from attnscale.backends.reference import ReferenceBackend
from attnscale.call.attention_call import FLAT_CALL, TENSORS, AttentionCall, FlatCall
from attnscale.call.context import Context, count_visible
from attnscale.policies.temperature import temperature
from attnscale.statistics.request import FLAT_REQUEST
from attnscale.statistics.rows.attend import attend_rows, rows_forward
from attnscale.statistics.rows.measures import contacts

BATCH, HEADS, LENGTH = 2, 4, 9
GENERATOR = torch.Generator().manual_seed(0)
SEEN = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=GENERATOR) < 0.6
DOCUMENTS = torch.arange(LENGTH) // torch.tensor([[4], [2]])
RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 3},
    "left window": {"window": (2, None)},
    "right window": {"window": (None, 2)},
    "two-sided window": {"window": (1, 2)},
    "cache": {"is_causal": True, "cache_offset": 3},
    "caches": {"is_causal": True, "cache_offset": torch.tensor([1, 3])},
    "slots": {"is_causal": True, "cache_offset": torch.arange(LENGTH).flip(0)[None]},
    "padding": {"key_padding": torch.arange(LENGTH) < torch.tensor([[3], [0]])},
    "documents": {"is_causal": True, "document_ids": DOCUMENTS},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 7, LENGTH])},
    "positions": {"is_causal": True, "positions": torch.arange(LENGTH)},
    "mask": {"attn_mask": SEEN[0, 0]},
    "mask per head": {"attn_mask": SEEN},
    "bias": {"attn_mask": torch.zeros(SEEN.shape).masked_fill(~SEEN, -math.inf)},
    "scale": {"scale": 0.125},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "everything": {
        "is_causal": True,
        "window": 5,
        "cache_offset": torch.tensor([0, 1]),
        "key_padding": torch.arange(LENGTH) < torch.tensor([[3], [0]]),
        "attn_mask": SEEN,
        "scale": 0.3,
        "softcap": 2.0,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}
# Given positions and counts only decide β.
LEFT_OUT = ("positions", "visible")


def call_of(rules: dict[str, Any], policy: str = "log") -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, n, LENGTH, 4, generator=generator) for n in (HEADS, 2, 2))
    call = bind(q, k, v, enable_gqa=True, **rules).call
    return replace(call, beta=temperature(build_policy(policy), call.context, call.query))


def same(one: object, other: object) -> bool:
    return one is other if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("policy", ["constant", "log"])
def test_a_call_is_the_same_after_a_round_trip(rules, policy):
    call = call_of(rules, policy)
    back = FlatCall.of(call).to_call()
    for field in fields(AttentionCall):
        if field.name == "context":
            continue
        given, found = getattr(call, field.name), getattr(back, field.name)
        if field.name == "beta" and not isinstance(given, Tensor):
            assert isinstance(found, Tensor)
            assert found.shape == (1, 1, 1)
            assert found.item() == pytest.approx(given)
            continue
        assert same(given, found), field.name
    for field in fields(Context):
        given, found = getattr(call.context, field.name), getattr(back.context, field.name)
        assert (found is None) if field.name in LEFT_OUT else same(given, found), field.name
    assert torch.equal(count_visible(call.context), count_visible(back.context))
    assert torch.equal(ReferenceBackend().run(call), ReferenceBackend().run(back))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_a_flat_call_is_the_same_after_a_round_trip(rules):
    flat = FlatCall.of(replace(call_of(rules), dropout_p=0.25))
    again = FlatCall.of(flat.to_call())
    for name in FlatCall._fields:
        assert same(getattr(flat, name), getattr(again, name)), name
    assert flat.dropout_p == 0.25


def test_every_field_of_a_call_takes_part():
    """The test above compares fields that are there; each of these differs from its default in some rule."""
    plain = FlatCall.of(call_of(RULES["nothing"], "constant"))
    changed = set()
    for rules in RULES.values():
        flat = FlatCall.of(replace(call_of(rules), dropout_p=0.25))
        changed |= {name for name in FlatCall._fields if not same(getattr(plain, name), getattr(flat, name))}
    assert changed == set(FlatCall._fields)


def test_an_operator_s_arguments_are_split_after_the_call():
    flat = FlatCall.of(call_of(RULES["everything"]))
    found, others = FlatCall.split((*flat, "one", 2))
    assert isinstance(found, FlatCall)
    assert all(same(a, b) for a, b in zip(found, flat, strict=True))
    assert tuple(others) == ("one", 2)


def test_gradients_stand_at_the_places_of_their_tensors():
    given = {name: torch.zeros(()) for name in ("sinks", "query", "mask", "beta")}
    found = FlatCall.gradients(**given)
    assert len(found) == len(FlatCall._fields)
    for name, gradient in zip(FlatCall._fields, found, strict=True):
        assert gradient is given.get(name), name


def test_the_schema_has_every_field_in_its_order_and_with_its_type():
    arguments = [argument.split() for argument in FLAT_CALL.split(", ")]
    assert tuple(name for _, name in arguments) == FlatCall._fields
    kinds = {Tensor: "Tensor", int: "SymInt", bool: "bool", float: "float"}
    hints = get_type_hints(FlatCall)
    for kind, name in arguments:
        accepted = {kinds[plain] for plain in kinds if hints[name] == plain}
        accepted |= {f"{kinds[plain]}?" for plain in kinds if hints[name] == plain | None}
        assert {kind} == accepted, name
    tensors = [kind.startswith("Tensor") for kind, _ in arguments]
    assert tensors == [True] * TENSORS + [False] * (len(tensors) - TENSORS)
    assert [argument.split()[1] for argument in FLAT_REQUEST.split(", ")] == [x.name for x in fields(StatsRequest)]


@pytest.mark.parametrize("name", ["rows_forward", "rows_backward", "contacts"])
def test_every_operator_begins_with_a_call(name):
    schema = getattr(torch.ops.attnscale, name).default._schema
    assert tuple(argument.name for argument in schema.arguments)[: len(FlatCall._fields)] == FlatCall._fields


def test_a_request_is_the_same_after_a_round_trip():
    for request in (
        StatsRequest(),
        StatsRequest(False, True, False, True, gap_thresholds=(0.5, 2.0), accumulation="exact", min_rank=5),
        StatsRequest(winner=True, first_share=7, accumulation="bracket"),
    ):
        assert StatsRequest(*request.flat()) == request
    sampled = StatsRequest(winner=True, rows=5, seed=3)
    assert StatsRequest(*sampled.flat()) == StatsRequest(winner=True)


@pytest.mark.parametrize("rules", ["causal", "caches", "everything"])
def test_the_operators_pass_the_checks_of_torch(rules):
    call = call_of(RULES[rules])
    leaves = {name: getattr(call, name).clone().requires_grad_() for name in ("query", "key", "value")}
    flat = FlatCall.of(replace(call, beta=call.row_beta().contiguous(), **leaves))
    request = StatsRequest(gap_thresholds=(0.5,), accumulation="bracket", winner=True)
    torch.library.opcheck(rows_forward, (*flat, *request.flat(), False, None))
    torch.library.opcheck(contacts, (*FlatCall.of(call.detached()), 2))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_gradients_through_the_operator_are_those_of_the_written_out_attention(rules):
    """Of every tensor of a call that can have one; with gradients the flat form is used, without it is not."""
    call = call_of(rules)
    found = []
    for run in (lambda call: attend_rows(call).out, ReferenceBackend().run):
        leaves = {name: getattr(call, name).double().requires_grad_() for name in ("query", "key", "value")}
        leaves["beta"] = call.row_beta().double().requires_grad_()
        if call.sinks is not None:
            leaves["sinks"] = call.sinks.double().requires_grad_()
        context, given = call.context, list(leaves.values())
        if call.bias is not None:
            given.append(call.bias.double().requires_grad_())
            context = replace(context, mask=given[-1])
        out = run(replace(call, context=context, **leaves))
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
