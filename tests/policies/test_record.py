"""The policy record of a config.json is read without transformers, as in a server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from attnscale.errors import ArgumentError
from attnscale.policies import build_policy
from attnscale.policies.record import build_described, describe, find_record, locate, read_modules, write_record

LOG = build_policy("log", reference_length=8)
SHAPE = {"num_heads": 4, "head_dim": 8}


def test_what_is_written_is_read_back() -> None:
    policies = {f"model.layers.{number}.self_attn": LOG for number in (0, 1, 3)} | {"pooler": build_policy("constant")}
    record = write_record(policies, "compose")
    assert list(record["modules"]) == ["model.layers.0-1,3.self_attn", "pooler"]
    assert record["on_existing"] == "compose"
    modules = read_modules(find_record({"text_config": {"attnscale": json.loads(json.dumps(record))}}))
    built = {path: build_described(entry, **SHAPE) for path, entry in modules.items()}
    assert {path: repr(policy) for path, policy in built.items()} == {k: repr(policy) for k, policy in policies.items()}


def test_a_config_without_a_record_has_none() -> None:
    assert find_record({"text_config": {"hidden_size": 8}, "attnscale": "log"}) is None


def test_paths_are_found_with_and_without_the_head_of_a_model() -> None:
    assert locate(["layers.0.attn"], ["model.layers.0.attn"], "model") == {"layers.0.attn": "model.layers.0.attn"}
    assert locate(["encoder.0", "decoder.0"], ["encoder.0"], "model") == {"encoder.0": "encoder.0"}


def test_a_policy_that_is_not_registered_is_refused_by_its_class() -> None:
    class Own(type(LOG)):  # type: ignore[misc]
        """A custom policy."""

    entry = describe(Own())
    with pytest.raises(ArgumentError, match="Own"):
        build_described(entry, **SHAPE)


def test_reading_needs_no_transformers() -> None:
    program = f"""
import sys
sys.modules |= dict.fromkeys(("transformers", "peft"))  # importing them raises
from attnscale.policies.record import build_described, find_record, read_modules
modules = read_modules(find_record({{"attnscale": {write_record({"layers.0.attn": LOG})!r}}}))
print(build_described(modules["layers.0.attn"], num_heads=4, head_dim=8)(64).item())
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) == pytest.approx(2.0)  # ln 64 / ln 8
