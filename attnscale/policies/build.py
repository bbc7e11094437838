"""Builds policies from names, mappings and YAML files."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor, nn

from attnscale._util import state
from attnscale._util.files import read_yaml
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies import adaptive, laws, learned, per_head, published, schedule
from attnscale.policies.base import LengthPolicy, Policy

# All classes that define a name, in definition order.
POLICIES: dict[str, type[LengthPolicy]] = {
    kind.name: kind
    for module in (laws, published, learned, schedule, adaptive, per_head)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, LengthPolicy) and "name" in vars(kind)
}

# Suffixes of policy files.
_FILES = (".yaml", ".yml")


def required_fields(kind: type[LengthPolicy]) -> list[str]:
    """Return the fields of a policy without a default."""
    missing = dataclasses.MISSING
    fields = (field for field in dataclasses.fields(kind) if field.init)
    return [field.name for field in fields if field.default is missing and field.default_factory is missing]


# Policies without required arguments. Learned policies require at least the number of heads.
STATELESS: tuple[str, ...] = tuple(name for name, kind in POLICIES.items() if not required_fields(kind))

PolicySpec = str | Path | Mapping[str, Any] | Policy
Kind = TypeVar("Kind", bound=type[LengthPolicy])


def register_policy(kind: Kind) -> Kind:
    """Register a custom `LengthPolicy` class under its `name`, for Python, mappings, YAML files and checkpoints.

    Usable as a function or a decorator. Registering the same class again has no effect. A process that reads such a
    file or checkpoint must register the class first.

    Args:
        kind: A subclass of `attnscale.LengthPolicy` with a class attribute `name`.

    Returns:
        The same class.

    Raises:
        ArgumentTypeError: `kind` is not a subclass of `LengthPolicy`.
        ArgumentError: The name is missing, ends in .yaml or .yml, or belongs to another class.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from attnscale import LengthPolicy, build_policy, register_policy
        >>> @register_policy
        ... @dataclass(eq=False, repr=False, kw_only=True)
        ... class FourthRoot(LengthPolicy):
        ...     name = "fourth_root"
        ...     gamma: float = 1.0
        ...
        ...     def formula(self, n, position):
        ...         return self.gamma * n.double() ** 0.25
        >>> build_policy("fourth_root", gamma=2.0).to_dict()
        {'name': 'fourth_root', 'gamma': 2.0}
    """
    if not isinstance(kind, type) or not issubclass(kind, LengthPolicy):
        reject_type("policy", kind, "a subclass of attnscale.LengthPolicy")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name or name.endswith(_FILES):
        reject("name", name, f"a non-empty string as class attribute `name` of {kind.__name__}, not a YAML file")
    taken = POLICIES.get(name) or state.REGISTERED_POLICIES.setdefault(name, kind)
    if taken is not kind:
        reject("name", name, f"a name for {kind.__name__} not used by {taken.__module__}.{taken.__qualname__}")
    return kind


def build_policy(spec: PolicySpec, **parameters: Any) -> Policy:
    """Build a policy from a name, a mapping or a YAML file; a policy is returned unchanged.

    Args:
        spec: A name such as "log", a mapping with the key `name`, a YAML file (a path, or a configuration of the
            package such as "policy/log.yaml"), or a policy.
        parameters: Fields of the policy. They override those of a mapping or file.

    Returns:
        A policy: a callable from n, an int or an integer tensor of any shape, to β in fp32.

    Raises:
        ArgumentError: An unknown name or parameter, a missing or invalid parameter, an unreadable file, or parameters
            given together with a policy.
        ArgumentTypeError: `spec` or a parameter has the wrong type.

    Example:
        >>> build_policy("log", reference_length=2048)(8192).item()
        1.1818...
        >>> build_policy({"name": "log", "reference_length": 2048}, floor=True)(1024).item()
        1.0
    """
    spec = read_spec(spec)
    if isinstance(spec, str):
        return _build(spec, parameters)
    if isinstance(spec, Mapping):
        if "name" not in spec:
            raise ArgumentError(f"policy={dict(spec)!r} is not accepted: expected the key 'name', one of {_names()}")
        rest = {key: value for key, value in spec.items() if key != "name"}
        return _build(spec["name"], rest | parameters)
    if isinstance(spec, type) or not isinstance(spec, Policy):
        reject_type("policy", spec, "a name, a mapping, a YAML file or a policy")
    if parameters:
        raise ArgumentError(f"parameters {sorted(parameters)} are not accepted together with a built policy, {spec!r}")
    return spec


def read_spec(spec: Any) -> Any:
    """Return the content of a YAML file; other values are returned unchanged."""
    return read_yaml(spec) if isinstance(spec, Path) or (isinstance(spec, str) and spec.endswith(_FILES)) else spec


def build_policy_for(spec: PolicySpec, *, num_heads: int, head_dim: int, **parameters: Any) -> Policy:
    """`build_policy` for one attention module: head number and dimension are filled in, and a given policy is copied.

    Args:
        spec: As in `build_policy`.
        num_heads: The number of heads of the module.
        head_dim: The head dimension of the module.
        parameters: As in `build_policy`; they take precedence over the shape of the module.

    Returns:
        A policy that is not shared with other modules.

    Raises:
        ArgumentError, ArgumentTypeError: As in `build_policy`.

    Example:
        >>> build_policy_for("ssmax", num_heads=8, head_dim=64)
        SSMax(num_heads=8, reference_length=2048, init=None, bias=False)
    """
    spec = read_spec(spec)
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    kind = find_policy(name)
    if kind is None:
        return copy.deepcopy(build_policy(spec, **parameters))
    given = set(parameters) | (set(spec) if isinstance(spec, Mapping) else set())
    fields = {field.name for field in dataclasses.fields(kind)}
    shape = {"num_heads": num_heads, "head_dim": head_dim}
    return build_policy(spec, **{key: shape[key] for key in shape if key in fields and key not in given}, **parameters)


def resolve(policy: PolicySpec) -> Policy:
    """`build_policy` for every call; stateless policies given by name are looked up."""
    return _BUILT[policy] if isinstance(policy, str) and policy in _BUILT else build_policy(policy)


def _build(name: object, parameters: Mapping[str, Any]) -> Policy:
    kind = find_policy(name)
    if kind is None:
        close = difflib.get_close_matches(str(name), (*POLICIES, *state.REGISTERED_POLICIES), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ArgumentError(f"policy={name!r} is not accepted: expected one of {_names()}.{hint}")
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    unknown = [key for key in parameters if key not in fields]
    if unknown:
        raise ArgumentError(
            f"parameter {unknown[0]!r} (value {parameters[unknown[0]]!r}) is not accepted by policy {name!r}: "
            f"it takes {', '.join(fields) or 'no parameters'}"
        )
    missing = [key for key in required_fields(kind) if key not in parameters]
    if missing:
        raise ArgumentError(f"policy {name!r} needs {', '.join(missing)}: it takes {', '.join(fields)}")
    for key, value in parameters.items():
        if isinstance(value, (Tensor, nn.Module)):
            reject_type(key, value, "a plain number; policies create their own parameters")
    return kind(**parameters)


def find_policy(name: object) -> type[LengthPolicy] | None:
    """Return the class of a built-in or registered name; None if unknown."""
    if not isinstance(name, str):
        return None
    return POLICIES.get(name) or state.REGISTERED_POLICIES.get(name)


def _names() -> str:
    return ", ".join((*POLICIES, *state.REGISTERED_POLICIES))


per_head.PerHead.build_part = staticmethod(lambda spec, heads: build_policy_for(spec, num_heads=heads, head_dim=1))

# Built at import, so that a name costs a lookup, also under torch.compile.
_BUILT: Mapping[str, Policy] = MappingProxyType({name: build_policy(name) for name in STATELESS})
