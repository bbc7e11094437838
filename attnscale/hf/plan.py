"""Which policy which layer and head gets: from a policy, a mapping or a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnscale._util.ranges import read_range, write_range
from attnscale._util.yaml_files import read_yaml
from attnscale.errors import ArgumentError, reject
from attnscale.hf.record import describe
from attnscale.policies import Policy, PolicySpec, build_policy, build_policy_for

_KEYS = ("default", "layers", "heads")


@dataclass(frozen=True)
class Plan:
    """A policy for every layer: `default`, but for the `layers` and, in each of them, the `heads` that are named.

    A layer's own entry may name heads too, which then come before those of the plan.

    >>> plan = read_plan({"default": "constant", "layers": {"4-11": {"name": "log", "reference_length": 2048}}})
    >>> plan.build(3, num_heads=8, head_dim=64), plan.build(4, num_heads=8, head_dim=64)
    (Constant(beta=1.0), Log(...reference_length=2048...))
    """

    default: Any
    layers: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, Any] = field(default_factory=dict)

    def build(self, layer: int, *, num_heads: int, head_dim: int) -> Policy:
        """The policy of one layer; where it was given as a finished one, a copy of that."""
        spec, heads = self._of(layer)
        shape = {"num_heads": num_heads, "head_dim": head_dim}
        if not heads:
            return build_policy_for(spec, **shape)
        for given, policy in heads.items():
            _check_heads(given, policy, len(read_range("heads", given)))
        if not isinstance(spec, Mapping):  # a finished policy, which per_head takes for a range of heads
            named = {head for given in heads for head in read_range("heads", given)}
            rest = [head for head in range(num_heads) if head not in named]
            if rest:
                _check_heads("default", spec, len(rest))
                heads = {**heads, write_range(rest): spec}
            spec = {"name": "constant"}
        return build_policy_for({"name": "per_head", "default": spec, "heads": heads}, **shape)

    def finished(self, layer: int) -> Policy | None:
        """The finished policy that one layer gets a copy of, if it was given one for all its heads."""
        spec, heads = self._of(layer)
        return None if heads or isinstance(spec, Mapping) else spec

    def check(self, layers: int) -> None:
        """Refuse ranges that no layer of the model answers to."""
        for given in self.layers:
            beyond = [index for index in read_range("layers", given) if index >= layers]
            if beyond:
                reject("layers", given, f"layers 0-{layers - 1} of this model")

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data that `read_plan` takes back; what finished policies have learned is not part of it."""
        if not self.layers and not self.heads:
            return dict(_described(self.default))
        parts = {"layers": self.layers, "heads": self.heads}
        return {"default": _described(self.default)} | {
            key: {given: _described(spec) for given, spec in part.items()} for key, part in parts.items() if part
        }

    def _of(self, layer: int) -> tuple[Any, Mapping[str, Any]]:
        for given, spec in self.layers.items():
            if layer in read_range("layers", given):
                inner = spec if isinstance(spec, Plan) else read_plan(spec)
                return inner.default, {**self.heads, **inner.heads}
        return self.default, self.heads


def read_plan(spec: PolicySpec | Plan, **parameters: Any) -> Plan:
    """A plan from whatever `build_policy` takes, or from a mapping (or YAML file) with `default`, `layers`, `heads`."""
    if isinstance(spec, Plan):
        return spec
    if isinstance(spec, Path) or (isinstance(spec, str) and spec.endswith((".yaml", ".yml"))):
        spec = read_yaml(spec)
    if isinstance(spec, Mapping) and "name" not in spec:
        unknown = [key for key in spec if key not in _KEYS]
        if unknown or not spec:
            raise ArgumentError(
                f"policy={dict(spec)!r} is not accepted: expected the key 'name' of a policy, or {', '.join(_KEYS)}"
            )
        if parameters:
            raise ArgumentError(f"parameters {sorted(parameters)} are not accepted beside a plan: put them inside")
        layers = {_key(key): _layer_plan(value) for key, value in spec.get("layers", {}).items()}
        heads = {_key(key): _plain(value) for key, value in spec.get("heads", {}).items()}
        for name, ranges in (("layers", layers), ("heads", heads)):
            _check_disjoint(name, ranges)
        return Plan(_plain(spec.get("default", "constant")), layers, heads)
    return Plan(_plain(spec, **parameters))


def _key(key: object) -> str:
    return str(key)  # YAML reads 3 as an int


def _layer_plan(spec: Any) -> Plan:
    inner = read_plan(spec)
    if inner.layers:
        reject("layers", spec, "a policy, or a mapping with 'default' and 'heads', inside a layer")
    return inner


def _plain(spec: PolicySpec, **parameters: Any) -> Any:
    """A policy as plain data, checked as far as that goes without the shape of a module; a finished one as it is."""
    if isinstance(spec, Policy) and not isinstance(spec, type):
        return build_policy(spec, **parameters)
    if isinstance(spec, Mapping):
        plain = dict(spec) | parameters
    elif isinstance(spec, str) and not spec.endswith((".yaml", ".yml")):
        plain = {"name": spec} | parameters
    elif isinstance(spec, (str, Path)):
        plain = read_yaml(spec) | parameters
    else:
        raise ArgumentError(f"policy={spec!r} is not accepted: expected a name, a mapping, a YAML file or a policy")
    build_policy_for(plain, num_heads=1, head_dim=2)
    return plain


def _described(spec: Any) -> Any:
    """Plain data for a finished policy, or for the plan of one layer."""
    if isinstance(spec, Plan):
        return spec.to_dict()
    return spec if isinstance(spec, Mapping) else describe(spec)


def _check_heads(given: str, policy: Any, heads: int) -> None:
    """Refuse a policy that was built for another number of heads than a range has."""
    built = policy.get("num_heads") if isinstance(policy, Mapping) else getattr(policy, "num_heads", None)
    if isinstance(built, int) and built != heads:
        raise ArgumentError(
            f"policy={policy!r} is not accepted for heads {given!r}: it was built for num_heads={built}, and these are "
            f"{heads}"
        )


def _check_disjoint(name: str, ranges: Iterable[str]) -> None:
    seen: dict[int, str] = {}
    for given in ranges:
        for index in read_range(name, given):
            if index in seen:
                reject(name, given, f"ranges that do not overlap; {index} is also in {seen[index]!r}")
            seen[index] = given
