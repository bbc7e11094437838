"""Different policies for different heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attnscale._util.ranges import read_range
from attnscale.errors import reject, reject_type
from attnscale.policies.base import LengthPolicy, Policy
from attnscale.policies.fields import length


@dataclass(eq=False, repr=False, kw_only=True)
class PerHead(LengthPolicy):
    """Different policies per head: `heads` maps ranges such as "0-3" to policies, `default` applies to the rest.

    β is [..., H, Tq] for n [..., 1, Tq] or [Tq]. If n differs between heads, [B, H, Tq], each policy gets the n of its
    heads. Learned policies get the number of heads of their range. Policies that read queries or scores cannot be
    combined per head.

    Args:
        num_heads: The number of heads H.
        default: The policy of the remaining heads, a name or a mapping.
        heads: Ranges of heads → policies, as names or mappings.

    Example:
        >>> from attnscale import build_policy
        >>> policy = build_policy("per_head", num_heads=3, heads={"1-2": {"name": "log", "reference_length": 64}})
        >>> policy(torch.tensor([[64, 4096]]))
        tensor([[1., 1.],
                [1., 2.],
                [1., 2.]])
    """

    name = "per_head"
    uses_position = True
    build_part: ClassVar[Callable[[Any, int], Policy]]  # set by `policies.build`
    num_heads: int = length(least=1)
    default: Any = "constant"
    heads: Mapping[str, Any]

    def validate(self) -> None:
        if not isinstance(self.heads, Mapping):
            reject_type("heads", self.heads, "a mapping of ranges such as '0-3' to policies")
        if not isinstance(self.default, (str, Mapping)):
            reject_type("default", self.default, "a policy name, or a mapping with name and parameters")
        # Copied, so that later changes do not affect `to_dict`.
        self.default, self.heads = copy.deepcopy(self.default), copy.deepcopy(dict(self.heads))
        owner: dict[int, str] = {}
        for given in self.heads:
            for head in read_range("heads", given):
                if head >= self.num_heads or head in owner:
                    reject("heads", given, f"ranges of heads 0-{self.num_heads - 1} that do not overlap")
                owner[head] = given
        rest = [head for head in range(self.num_heads) if head not in owner]
        # Sorted, because a saved config sorts its keys and parameters are identified by position. As text, because YAML
        # reads the key 3 as an int.
        by_name = sorted(self.heads.items(), key=lambda item: str(item[0]))
        groups = [(read_range("heads", given), spec) for given, spec in by_name]
        groups += [(rest, self.default)] if rest else []
        self.parts = nn.ModuleList(self._part(spec, len(heads)) for heads, spec in groups)
        order = [head for heads, _ in groups for head in heads]
        self._sizes = [len(heads) for heads, _ in groups]
        # Slices instead of an index: a list of ints would be copied to the device in every call, and a buffer would be
        # lost by models built on the meta device.
        self._heads_of_parts = [runs(heads) for heads, _ in groups]
        self._parts_in_order = runs([order.index(head) for head in range(self.num_heads)])

    def _part(self, spec: Any, heads: int) -> LengthPolicy:
        part = type(self).build_part(spec, heads)
        if not isinstance(part, LengthPolicy) or part.needs_query or hasattr(part, "needs_scores"):
            reject("heads", spec, "policies of length or position; those reading queries or scores apply to all heads")
        return part

    def formula(self, n: Tensor, position: Tensor) -> Tensor:
        rows = torch.broadcast_shapes(n.shape, position.shape)[-1:]  # type: ignore[no-untyped-call]
        parts = []
        for part, size, heads in zip(self._policies(), self._sizes, self._heads_of_parts, strict=True):
            beta = part.formula(self._of(n, heads), self._of(position, heads))
            beta = beta if beta.dim() > 1 else beta.reshape(1, -1)
            parts.append(beta.expand(*beta.shape[:-2], size, *(rows or (1,))))
        lead = torch.broadcast_shapes(*(beta.shape[:-2] for beta in parts))  # type: ignore[no-untyped-call]
        parts = [beta.expand(*lead, *beta.shape[-2:]) for beta in parts]
        beta = take(torch.cat(parts, -2), self._parts_in_order)
        # Every process keeps the parameters of all heads.
        return beta if self.own_heads is None else self.own_heads.of(beta)

    def longest_beta(self) -> float:
        return max(part.longest_beta() for part in self._policies())

    def _of(self, n: Tensor, heads: Sequence[slice]) -> Tensor:
        """Return the lengths or positions of some heads; all of them if they are shared."""
        if n.dim() < 2 or n.shape[-2] == 1:
            return n
        if n.shape[-2] != self.num_heads:
            reject("n or positions", list(n.shape), f"[..., 1, Tq] or [..., {self.num_heads}, Tq]")
        return take(n, heads)

    def _policies(self) -> list[LengthPolicy]:
        return [part for part in self.parts if isinstance(part, LengthPolicy)]


def runs(heads: Sequence[int]) -> list[slice]:
    """Return the shortest list of slices that gives these heads in order.

    >>> runs([4, 5, 6, 0])
    [slice(4, 7, None), slice(0, 1, None)]
    """
    found: list[slice] = []
    for head in heads:
        if found and head == found[-1].stop:
            found[-1] = slice(found[-1].start, head + 1)
        else:
            found.append(slice(head, head + 1))
    return found


def take(x: Tensor, heads: Sequence[slice]) -> Tensor:
    """Return some heads of a tensor [..., H, T] by slicing, without a host-to-device copy."""
    slices = [x[..., run, :] for run in heads]
    return slices[0] if len(slices) == 1 else torch.cat(slices, -2)
