"""The policies of a checkpoint as tables of β by position, for engines that compute attention themselves.

In a decoder, the query at position p sees p + 1 keys, or as many as its sliding window holds. A policy of length and
position is therefore a table over the position, and applying it is an index and a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnscale.errors import ArgumentError
from attnscale.policies.base import LengthPolicy, Policy, reads_scores
from attnscale.policies.record import build_described, is_of_policy, read_modules, split_name

# Submodule of `<attention module>.attnscale` that holds the policy, in the names of its tensors.
_POLICY = "policy."


class LayerShape(NamedTuple):
    """The heads of one attention layer, over all processes."""

    num_heads: int
    head_dim: int


def layer_policies(
    record: Mapping[str, Any],
    shapes: Mapping[str, LayerShape],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, LengthPolicy]:
    """Build the policies of a record, with their learned values.

    Args:
        record: the entry `attnscale` of config.json.
        shapes: path of each attention module → its heads; paths without a policy are ignored.
        tensors: the tensors of the checkpoint, by name; those of other modules are ignored.
        dtype: dtype of the model, to which learned values are rounded, as in a transformers model; default: fp32.

    Returns:
        Path → policy in eval mode, on the CPU.

    Raises:
        ArgumentError: a policy has no table, is not registered or lacks learned values, or its module is unknown.

    Example:
        >>> record = {"modules": {"layers.0-1.attn": {"name": "log", "reference_length": 64}}}
        >>> shapes = {f"layers.{i}.attn": LayerShape(num_heads=4, head_dim=16) for i in range(2)}
        >>> beta_table(layer_policies(record, shapes, {})["layers.1.attn"], 4096)[-1]
        tensor([2.])
    """
    learned: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if is_of_policy(name):
            path, rest = split_name(name)
            learned.setdefault(path, {})[rest.removeprefix(_POLICY)] = value
    policies: dict[str, LengthPolicy] = {}
    for path, entry in read_modules(record).items():
        if path not in shapes:
            raise ArgumentError(f"config.attnscale names {path!r}, which this model does not have")
        policy = check_has_table(build_described(entry, **shapes[path]._asdict()), path)
        if dtype is not None:
            policy.to(dtype)
        _load(policy, path, learned.get(path, {}))
        policies[path] = policy
    return policies


def check_has_table(policy: Policy, path: str = "") -> LengthPolicy:
    """Return a policy in eval mode; raise if its β is not a function of length and position.

    >>> from attnscale import build_policy
    >>> check_has_table(build_policy("entropy_adaptive"))
    Traceback (most recent call last):
    ...
    attnscale.errors.ArgumentError: policy EntropyAdaptive(threshold=0.5) has no table of β by length: it reads ...
    """
    if isinstance(policy, nn.Module):
        policy.eval()
    reads = "scores" if reads_scores(policy) else "queries" if policy.needs_query else None
    where = f" of {path}" if path else ""
    if reads is not None or not isinstance(policy, LengthPolicy):
        what = f"reads {reads}" if reads else f"is a {type(policy).__name__}, not a LengthPolicy"
        raise ArgumentError(
            f"policy {policy!r}{where} has no table of β by length: it {what}; serve the model with a length law, a "
            "preset, ssmax or a plan of these, or run it with transformers and attnscale.hf"
        )
    return policy


def beta_table(policy: LengthPolicy, length: int, window: int | None = None) -> Tensor:
    """Return β [length, H|1] in fp32 for every position of a causal sequence, with an optional sliding window.

    Args:
        policy: a policy of length and position.
        length: the number of positions.
        window: the number of keys in the sliding window, including the query's own.

    Returns:
        One column if all heads have the same β, else one for each head.

    Raises:
        ArgumentError: the policy reads scores or queries, or β is not finite.

    Example:
        >>> from attnscale import build_policy
        >>> beta_table(build_policy("log", reference_length=4), 4, window=2)
        tensor([[0.5000],
                [0.5000],
                [0.5000],
                [0.5000]])
    """
    positions = torch.arange(length, device="cpu")
    visible = (positions + 1).clamp(max=length if window is None else window)
    with torch.no_grad():
        beta = check_has_table(policy)(visible, positions=positions).to(torch.float32)
    table: Tensor = beta.reshape(-1, length).T.contiguous()  # [length, H|1]
    if not bool(torch.isfinite(table).all()):
        raise ArgumentError(f"policy {policy!r} is not accepted: its β is not finite below {length} positions")
    return table


def _load(policy: LengthPolicy, path: str, values: Mapping[str, Tensor]) -> None:
    """Load the learned values of a policy; raise if they do not fit."""
    wanted = policy.state_dict()
    if set(wanted) != set(values):
        name = min(set(wanted) ^ set(values))
        what = "lacks" if name in wanted else "has an unexpected tensor"
        raise ArgumentError(f"the checkpoint {what} {path}.attnscale.{_POLICY}{name}, for policy {policy!r}")
    for name, value in values.items():
        if value.shape != wanted[name].shape:
            raise ArgumentError(
                f"{path}.attnscale.{_POLICY}{name} of shape {list(value.shape)} is not accepted: expected "
                f"{list(wanted[name].shape)}, for policy {policy!r}"
            )
    policy.load_state_dict(dict(values))
