"""`gap_adaptive(anchor="trained")`: each head keeps the criticality it had at its trained length."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from attnscale import ArgumentError, ArgumentTypeError, build_policy
from attnscale.policies.base import reads_scores
from attnscale.serve.tables import beta_table

SHARED = {64: 0.4, 256: 0.8, 1024: 1.2}
PER_HEAD = {64: [0.4, 0.5], 256: [0.8, 0.5]}


def anchored(table, **changes):
    return build_policy("gap_adaptive", **({"anchor": "trained", "reference_length": 64, "table": table} | changes))


def test_beta_is_the_growth_of_the_table_since_the_trained_length() -> None:
    assert anchored(SHARED)(torch.tensor([64, 256, 1024])).tolist() == pytest.approx([1.0, 2.0, 3.0])


def test_beta_is_one_up_to_the_first_length_of_the_table() -> None:
    assert anchored(SHARED)(torch.arange(1, 65)).tolist() == [1.0] * 64


def test_between_two_lengths_the_scale_is_a_power_of_n() -> None:
    assert anchored(SHARED)(128).item() == pytest.approx(math.sqrt(2))


def test_beyond_the_last_length_the_scale_grows_with_its_last_exponent() -> None:
    assert anchored(SHARED)(4096).item() == pytest.approx(3 * 1.5)


def test_each_head_follows_its_own_column() -> None:
    policy = anchored(PER_HEAD, num_heads=2)
    assert policy(torch.tensor([[64, 256]])).tolist() == [pytest.approx([1.0, 2.0]), pytest.approx([1.0, 1.0])]


def test_no_scores_are_read_in_training_or_evaluation_and_nothing_is_learned() -> None:
    policy = anchored(SHARED)
    assert not reads_scores(policy.train())
    assert not reads_scores(policy.eval())
    assert policy.state_dict() == {}


def test_prefill_and_decoding_have_the_same_beta() -> None:
    policy = anchored(PER_HEAD, num_heads=2)
    prefill = policy(torch.arange(1, 301)[None])
    decoded = torch.cat([policy(torch.tensor([[n]])) for n in range(1, 301)], -1)
    assert torch.equal(prefill, decoded)


def test_it_survives_json_and_copies_and_has_a_table_for_serving() -> None:
    policy = anchored(PER_HEAD, num_heads=2)
    read = build_policy(json.loads(json.dumps(policy.to_dict())))
    for other in (read, copy.deepcopy(policy)):
        assert torch.equal(other(torch.tensor([[64, 200, 9999]])), policy(torch.tensor([[64, 200, 9999]])))
    assert beta_table(policy, 256)[-1].tolist() == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"anchor": "training"}, ArgumentError, "anchor='training' is not accepted: expected 'trained' or None"),
        ({"anchor": None}, ArgumentError, "table=.* is not accepted: expected a value with anchor"),
        ({"table": None}, ArgumentError, "table=None is not accepted"),
        ({"reference_length": None}, ArgumentError, "reference_length=None is not accepted"),
        ({"r": 4.0}, ArgumentError, "anchor='trained' is not accepted: expected the defaults of scope"),
        ({"scope": "head", "num_heads": 2}, ArgumentError, "anchor='trained' is not accepted"),
        ({"table": [1.0]}, ArgumentTypeError, "table=.*a mapping of two or more lengths"),
        ({"table": {64: 0.4}}, ArgumentError, "table=.*two or more lengths"),
        ({"table": {64: 0.4, 128: [0.5, 0.5]}}, ArgumentError, "table="),
        ({"table": {64: 0.4, 128: -1}}, ArgumentError, "table=-1 is not accepted"),
        ({"table": {64: [0.4], 128: [0.5]}, "num_heads": 2}, ArgumentError, "lists of 2 numbers"),
    ],
)
def test_a_wrong_table_is_refused(changes, kind, message) -> None:
    with pytest.raises(kind, match=message):
        anchored(**({"table": SHARED} | changes))
