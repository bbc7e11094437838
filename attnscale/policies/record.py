"""The policies of a checkpoint as plain data: the entry `attnscale` of config.json, and the names of its tensors.

Modules are identified by their paths in the model, with ranges for layer numbers. Reading does not require
transformers.

    {"modules": {"model.layers.0-31.self_attn": {"name": "log", "reference_length": 8192}}}
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError
from attnscale.policies.base import LengthPolicy, Policy
from attnscale.policies.build import build_policy_for, find_policy

# The config entry, the attention implementation, and the child of an attention module: the parameters of
# `model.layers.0.self_attn.attnscale` are part of the checkpoint.
NAME = "attnscale"

MODULES = "modules"
ON_EXISTING = "on_existing"

# Prefix of a name in `architectures` of config.json that engines without attnscale do not know, and so refuse.
ARCHITECTURE_PREFIX = "Attnscale"

# The tensor in an adapter file that describes the policy of an attention module and the handling of the model's own
# scaling, as JSON bytes.
DESCRIPTION = "description"

# The key for the class of a policy without a registered name.
_CLASS = "class"

_MARK = f".{NAME}."
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_RANGE = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def write_record(policies: Mapping[str, Policy], on_existing: str = "raise") -> dict[str, Any]:
    """Return the record of a model with these policies, by module path."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, policy in policies.items():
        pattern, number = split_number(path)
        description = json.dumps(describe(policy), sort_keys=True)
        groups.setdefault((pattern, description), []).extend([] if number is None else [number])
    modules = {
        pattern.replace("*", write_range(numbers), 1): json.loads(description)
        for (pattern, description), numbers in groups.items()
    }
    return {MODULES: modules} | ({} if on_existing == "raise" else {ON_EXISTING: on_existing})


def find_record(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record in the data of a config.json, or in a nested part of it.

    >>> find_record({"text_config": {"attnscale": {"name": "log"}}})
    {'name': 'log'}
    """
    record = config.get(NAME)
    if isinstance(record, Mapping):
        return record
    parts = (find_record(part) for part in config.values() if isinstance(part, Mapping))
    return next((part for part in parts if part is not None), None)


def read_modules(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return path → description of its policy, for every module in a record.

    >>> list(read_modules({"modules": {"layers.0,2-3.attention": {"name": "log"}}}))
    ['layers.0.attention', 'layers.2.attention', 'layers.3.attention']
    """
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, entry in record[MODULES].items():
        parts = [
            [str(number) for number in read_range(MODULES, part)] if _RANGE.fullmatch(part) else [part]
            for part in pattern.split(".")
        ]
        found |= {".".join(path): entry for path in itertools.product(*parts)}
    return found


def locate(recorded: Iterable[str], present: Iterable[str], prefix: str) -> dict[str, str]:
    """Return recorded path → path in the model, where either of the two may have a prefix that the other lacks.

    `prefix` is the attribute under which a model with a head holds the base model.

    >>> locate(["model.layers.0.self_attn"], ["layers.0.self_attn"], "model")
    {'model.layers.0.self_attn': 'layers.0.self_attn'}
    """
    known, found = set(present), {}
    for path in recorded:
        for candidate in (path, path.removeprefix(f"{prefix}."), f"{prefix}.{path}"):
            if candidate in known:
                found[path] = candidate
                break
    return found


def describe(policy: Policy) -> dict[str, Any]:
    """Return a policy as JSON data: name and fields, and the class if the name is not registered."""
    kind = type(policy)
    try:  # fields may be policies
        own = policy.to_dict() if isinstance(policy, LengthPolicy) else {}
        plain: dict[str, Any] = json.loads(json.dumps(own, default=lambda value: value.to_dict()))
    except (AttributeError, TypeError, ValueError):  # a class without a name, or fields that are not plain data
        plain = {}
    return plain if plain and find_policy(plain["name"]) is kind else plain | {_CLASS: kind.__qualname__}


def build_described(entry: Mapping[str, Any], *, num_heads: int, head_dim: int) -> Policy:
    """Inverse of `describe`, for a module of this shape. Descriptions do not contain learned values."""
    plain = {key: value for key, value in entry.items() if key != _CLASS}
    kind, told = find_policy(plain.get("name")), entry.get(_CLASS)
    if kind is None or (told is not None and told != kind.__qualname__):
        what = told or plain.get("name")
        raise ArgumentError(
            f"policy {what!r} in config.attnscale is not registered: import the module that defines it and call "
            "attnscale.register_policy with its class before loading"
        )
    return build_policy_for(plain, num_heads=num_heads, head_dim=head_dim)


def split_number(path: str) -> tuple[str, int | None]:
    """Return a path with * instead of its first number, and the number.

    >>> split_number("model.layers.3.self_attn"), split_number("pooler")
    (('model.layers.*.self_attn', 3), ('pooler', None))
    """
    match = _NUMBER.search(f".{path}.")
    return _NUMBER.sub("*", f".{path}.", count=1)[1:-1], None if match is None else int(match[0])


def is_of_policy(tensor: str) -> bool:
    """Whether a tensor with this name belongs to a policy."""
    return _MARK in f".{tensor}"


def split_name(tensor: str) -> tuple[str, str]:
    """Return the path of the attention module of a policy tensor, and the tensor's name there.

    >>> split_name("model.layers.0.self_attn.attnscale.policy.s")
    ('model.layers.0.self_attn', 'policy.s')
    """
    path, _, rest = f".{tensor}".rpartition(_MARK)
    return path[1:], rest
