"""Policies and rotary embeddings as the command line writes them.

"log", "gap_adaptive:r=4", "argmax=constant:beta=1e6", "log@yarn:2".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.yaml_files import read_yaml
from attnscale.errors import ArgumentError, reject
from attnscale.policies import POLICIES, build_policy_for
from attnscale.policies.build import required_fields

KINDS = ("yarn", "linear")
UNSTRETCHED = "own"  # the rotary embedding that the model's config has

# Laws of the length, which a trained model is given anchored at its trained length, and never below 1.
ANCHORED = ("sqrt_log", "log", "log_squared", "power")

OWN = "own"  # the policy that a model was saved with

# What a module of the model brings to its policy, and a value for the message about each other field without a default.
_SHAPE = {"num_heads": 1, "head_dim": 2}
_EXAMPLES = {"exponent": 0.5, "factor": 4, "original_length": 4096, "reference_length": 4096, "a": 4096, "rho": 0.5}
_ENTRY = re.compile(r"(?:(?P<label>[\w.+-]+)=)?(?P<name>[^:=]+)(?P<parameters>(?::\w+=[^:=]+)*)")


def read_rope(rope: str) -> tuple[str, float]:
    """Kind and factor.

    >>> read_rope("yarn:4")
    ('yarn', 4.0)
    """
    kind, _, factor = rope.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if kind not in KINDS or not 1 <= number < float("inf"):
        reject("rope", rope, f"{' or '.join(f'{kind}:4' for kind in KINDS)}, with a factor >= 1, or {UNSTRETCHED}")
    return kind, number


def stretch(config: Any, rope: str | None, trained_length: int) -> None:
    """Stretch the rotary embedding of a config in place; layers with a sliding window keep theirs.

    Temperature is the policy's: YaRN's own factor of the logits is switched off. (The policy yarn:factor=4 has it.)
    """
    if rope is None or rope == UNSTRETCHED:
        return
    kind, factor = read_rope(rope)
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None)
    if not known:
        raise ArgumentError(f"rope={rope!r} is not accepted: a {text.model_type} model has no rotary embedding")
    stretched: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        stretched |= {"original_max_position_embeddings": trained_length, "attention_factor": 1.0}
    if "rope_theta" in known:
        text.rope_parameters = _base(known) | stretched
    else:  # a rotary embedding for each type of layer
        text.rope_parameters = known | {"full_attention": _base(known["full_attention"]) | stretched}


def _base(parameters: dict[str, Any]) -> dict[str, Any]:
    """What a rotary embedding is without any stretching that it had."""
    return {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}


class Law(NamedTuple):
    """A policy to evaluate: its name in tables, what `attnscale.hf.apply` is given, and the rotary embedding."""

    label: str
    policy: dict[str, Any]
    rope: str | None = None  # None and "own": the one that the model has


def read_law(entry: str, trained_length: int, rope: str | None = None) -> Law:
    """A policy from its text; length laws without parameters are anchored at the trained length.

    `@` and a rotary embedding at the end take the place of `rope`. Parameters are checked here, before a model is read.

    >>> read_law("log", 128)
    Law(label='log', policy={'name': 'log', 'reference_length': 128, 'floor': True}, rope=None)
    >>> read_law("argmax=constant:beta=1e6", 128)
    Law(label='argmax', policy={'name': 'constant', 'beta': 1000000.0}, rope=None)
    >>> read_law("unstretched=constant@own", 128, rope="yarn:4")
    Law(label='unstretched', policy={'name': 'constant'}, rope='own')
    """
    written, at, own_rope = entry.partition("@")
    rope = own_rope if at else rope
    if rope is not None and rope != UNSTRETCHED:
        read_rope(rope)
    if written.endswith((".yaml", ".yml")):
        label, _, path = written.rpartition("=")
        return Law(label or Path(path).stem + at + own_rope, read_yaml(path), rope)
    found = _ENTRY.fullmatch(written)
    if found is None or found["name"] not in (*POLICIES, OWN):
        accepted = "a policy such as log, gap_adaptive:r=4, argmax=constant:beta=1e6 or log@yarn:2, or a YAML file"
        reject("policies", entry, f"{accepted}; known are {', '.join(POLICIES)}")
    name, given = found["name"], dict(part.split("=") for part in found["parameters"].split(":")[1:])
    parameters: dict[str, Any] = {key: _number(value) for key, value in given.items()}
    if name in ANCHORED and not parameters:
        parameters = {"reference_length": trained_length, "floor": True}
    if name == OWN and rope is not None and rope != UNSTRETCHED:
        reject("policies", entry, f"{OWN}@{UNSTRETCHED}: a model with its own policy keeps its rotary embedding")
    if name != OWN:
        _check(entry, name, parameters)
    label = found["label"] or name + found["parameters"] + at + own_rope
    return Law(label, {"name": name, **parameters}, rope)


def _check(entry: str, name: str, parameters: dict[str, Any]) -> None:
    """Refuse parameters that are missing, with an example, or that the policy does not take."""
    missing = [field for field in required_fields(POLICIES[name]) if field not in parameters | _SHAPE]
    if not set(missing) <= _EXAMPLES.keys():
        reject("policies", entry, f"a YAML file: {name} needs {', '.join(missing)}")
    if missing:
        example = ":".join([name, *(f"{field}={_EXAMPLES[field]}" for field in missing)])
        reject("policies", entry, f"{name} with {' and '.join(missing)}, such as {example}")
    build_policy_for({"name": name, **parameters}, **_SHAPE)


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
