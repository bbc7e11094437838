"""Policies as the command line writes them: "log", "gap_adaptive:r=4", "argmax=constant:beta=1e6", "log@yarn:2"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from attnscale._util.yaml_files import read_yaml
from attnscale.errors import reject
from attnscale.lab.rope import UNSTRETCHED, read_rope
from attnscale.policies import POLICIES

# Laws of the length, which a trained model is given anchored at its trained length, and never below 1.
ANCHORED = ("sqrt_log", "log", "log_squared", "power")

OWN = "own"  # the policy that a model was saved with
_ENTRY = re.compile(r"(?:(?P<label>[\w.+-]+)=)?(?P<name>[^:=]+)(?P<parameters>(?::\w+=[^:=]+)*)")


class Law(NamedTuple):
    """A policy to evaluate: its name in tables, what `attnscale.hf.apply` is given, and the rotary embedding."""

    label: str
    policy: dict[str, Any]
    rope: str | None = None  # None and "own": the one that the model has


def read_law(entry: str, trained_length: int, rope: str | None = None) -> Law:
    """A policy from its text; length laws without parameters are anchored at the trained length.

    `@` and a rotary embedding at the end take the place of `rope`.

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
    label = found["label"] or name + found["parameters"] + at + own_rope
    return Law(label, {"name": name, **parameters}, rope)


def _number(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
