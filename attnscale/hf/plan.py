"""Plans: the policy of each layer and head, read from a policy, a mapping or a YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnscale._util.checks import plain_numbers
from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError, reject
from attnscale.hf.attention_layers import AttentionLayer
from attnscale.policies import Policy, PolicySpec, build_policy, build_policy_for
from attnscale.policies.build import read_spec
from attnscale.policies.record import describe

_KEYS = ("default", "layers", "heads")


@dataclass(frozen=True)
class Plan:
    """The policies of a model, by layer and head. Made by `read_plan`.

    Attributes:
        default: policy of all other layers and heads.
        layers: range of layers ("4-11") → policy, or a plan with `default` and `heads`, whose heads take precedence.
        heads: range of heads ("0-3") → policy, in every layer.

    Example:
        >>> plan = read_plan({"default": "constant", "layers": {"4-11": {"name": "log", "reference_length": 2048}}})
        >>> plan.build(3, num_heads=8, head_dim=64), plan.build(4, num_heads=8, head_dim=64)
        (Constant(beta=1.0), Log(...reference_length=2048...))
    """

    default: Any
    layers: Mapping[str, Any] = field(default_factory=dict)
    heads: Mapping[str, Any] = field(default_factory=dict)

    def build(self, layer: int, *, num_heads: int, head_dim: int) -> Policy:
        """Build the policy of one layer. A policy instance in the plan is copied.

        Raises:
            ArgumentError: a policy instance was built for another number of heads.
        """
        spec, heads = self.default, self.heads
        for given, own in self.layers.items():
            if layer in read_range("layers", given):
                inner = own if isinstance(own, Plan) else read_plan(own)
                spec, heads = inner.default, {**self.heads, **inner.heads}
                break
        shape = {"num_heads": num_heads, "head_dim": head_dim}
        if not heads:
            return build_policy_for(spec, **shape)
        named = {given: read_range("heads", given) for given in heads}
        for given, policy in heads.items():
            _check_heads(given, policy, len(named[given]))
        rest = sorted(set(range(num_heads)).difference(*named.values()))
        if not isinstance(spec, Mapping):  # per_head takes a policy instance only for a range of heads
            if rest:
                _check_heads("default", spec, len(rest))
                heads = {**heads, write_range(rest): spec}
            spec = {"name": "constant"}
        return build_policy_for({"name": "per_head", "default": spec, "heads": heads}, **shape)

    def check(self, layers: int) -> None:
        """Raise `ArgumentError` if a range exceeds the number of layers of a model."""
        for given in self.layers:
            if max(read_range("layers", given)) >= layers:
                reject("layers", given, f"layers 0-{layers - 1} of this model")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for `read_plan`, without the learned values of policy instances."""
        if not self.layers and not self.heads:
            return dict(_described(self.default))
        parts = {"layers": self.layers, "heads": self.heads}
        return {"default": _described(self.default)} | {
            key: {given: _described(spec) for given, spec in part.items()} for key, part in parts.items() if part
        }


def read_plan(spec: PolicySpec | Plan, **parameters: Any) -> Plan:
    """Read a plan.

    Args:
        spec: anything accepted by `build_policy`, for all layers; or a mapping or YAML file with `default`, `layers`
            and `heads`; or a `Plan`, which is returned.
        **parameters: parameters of the policy; not accepted together with a plan.

    Returns:
        The checked `Plan`.

    Raises:
        ArgumentError: unknown keys or policies, invalid parameters, or overlapping ranges.

    Example:
        >>> read_plan("log", reference_length=2048).to_dict()
        {'name': 'log', 'reference_length': 2048}
    """
    if isinstance(spec, Plan):
        return spec
    given = read_spec(spec)
    if isinstance(given, Mapping) and "name" not in given:
        unknown = [key for key in given if key not in _KEYS]
        if unknown or not given:
            raise ArgumentError(
                f"policy={dict(given)!r} is not accepted: expected the key 'name', or the keys {', '.join(_KEYS)}"
            )
        if parameters:
            raise ArgumentError(
                f"parameters {sorted(parameters)} are not accepted together with a plan: put them into the plan"
            )
        layers = {str(key): _layer_plan(value) for key, value in given.get("layers", {}).items()}  # YAML has int keys
        heads = {str(key): _plain(value) for key, value in given.get("heads", {}).items()}
        _check_disjoint("layers", layers)
        _check_disjoint("heads", heads)
        return Plan(_plain(given.get("default", "constant")), layers, heads)
    return Plan(_plain(given, **parameters))


def build_policies(plan: Plan, layers: Iterable[AttentionLayer]) -> dict[str, Policy]:
    """Return module path → policy for the given layers of a plan."""
    return {layer.path: check_fits(plan.build(layer.layer, **layer.shape), layer) for layer in layers}


def beta_at_end(policy: Policy, layer: AttentionLayer, lengths: Sequence[int]) -> Tensor:
    """Return β [H|1, L] of a length policy in a layer, for the last row of texts of these lengths."""
    tensors = [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []
    device = tensors[0].device if tensors else torch.device("cpu")
    position = torch.tensor(lengths, device=device).reshape(1, 1, -1) - 1  # [1, 1, L]
    visible = (position + 1).clamp(max=layer.window or max(lengths))
    with torch.no_grad():
        return policy(visible, positions=position).broadcast_to(1, -1, len(lengths))[0]


def check_fits(policy: Policy, layer: AttentionLayer) -> Policy:
    """Return the policy; raise if it was built for another number or size of heads."""
    for name, own in (("num_heads", layer.num_heads), ("head_dim", layer.head_dim)):
        built = getattr(policy, name, None)
        if isinstance(built, int) and own is not None and built != own:
            raise ArgumentError(
                f"policy={policy!r} is not accepted: it was built for {name}={built}, but {layer.path} has {name}={own}"
            )
    return policy


def _layer_plan(spec: Any) -> Plan:
    inner = read_plan(spec)
    if inner.layers:
        reject("layers", spec, "a policy, or a mapping with 'default' and 'heads', inside a layer")
    return inner


def _plain(spec: PolicySpec, **parameters: Any) -> Any:
    """Return a policy as plain data, checked as far as possible without a module's shape; an instance unchanged."""
    spec = read_spec(spec)
    if isinstance(spec, Policy) and not isinstance(spec, type):
        return build_policy(spec, **parameters)
    if not isinstance(spec, (str, Mapping)):
        raise ArgumentError(f"policy={spec!r} is not accepted: expected a name, a mapping, a YAML file or a policy")
    plain: dict[str, Any] = plain_numbers(({"name": spec} if isinstance(spec, str) else dict(spec)) | parameters)
    build_policy_for(plain, num_heads=1, head_dim=2)
    return plain


def _described(spec: Any) -> Any:
    """Return a policy instance, or the plan of one layer, as plain data."""
    if isinstance(spec, Plan):
        return spec.to_dict()
    return spec if isinstance(spec, Mapping) else describe(spec)


def _check_heads(given: str, policy: Any, heads: int) -> None:
    """Raise if a policy was built for another number of heads than the range has."""
    built = policy.get("num_heads") if isinstance(policy, Mapping) else getattr(policy, "num_heads", None)
    if isinstance(built, int) and built != heads:
        raise ArgumentError(
            f"policy={policy!r} is not accepted for heads {given!r}: it was built for num_heads={built}, but the range "
            f"has {heads}"
        )


def _check_disjoint(name: str, ranges: Iterable[str]) -> None:
    seen: dict[int, str] = {}
    for given in ranges:
        for index in read_range(name, given):
            if index in seen:
                reject(name, given, f"ranges that do not overlap; {index} is also in {seen[index]!r}")
            seen[index] = given
