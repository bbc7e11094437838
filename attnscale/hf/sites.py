"""The policies of a transformers model: a child module of each attention that has one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from attnscale.hf.switching import Restore
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy

# The name of the child: `model.layers.0.self_attn.attnscale`, whose parameters the checkpoint then holds.
CHILD = "attnscale"


class Site(ScaledDotProductAttention):
    """The attention that computes for a module of a transformers model; a child of that module.

    It carries what has to be undone when it goes, so that a copy of the model can be restored as well as the model
    itself. `override` says that it answers to "sdpa" too.
    """

    def __init__(self, policy: Policy, override: bool = False) -> None:
        super().__init__(policy)
        self.undo: list[Restore] = []
        self.override = override
        self._hold()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what was unpickled, answers to the same names as the original."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._hold()

    def _hold(self) -> None:
        if self.override:
            from attnscale.hf.interface import hold_sdpa  # which knows this file

            hold_sdpa(self)


def has_site(module: nn.Module) -> bool:
    """Whether an attention has a policy of its own."""
    return module._modules.get(CHILD) is not None


def is_decided(module: nn.Module) -> bool:
    """Whether an attention has a policy or was left without one on purpose."""
    return CHILD in module._modules


def site_at(module: nn.Module) -> Site:
    """The site of an attention that has one."""
    site = module._modules[CHILD]
    if not isinstance(site, Site):
        raise KeyError(CHILD)
    return site


def is_learned(policy: Policy) -> bool:
    """Whether a policy has parameters or buffers of its own, which a checkpoint has to hold."""
    return isinstance(policy, nn.Module) and bool(policy.state_dict())


def add_site(module: nn.Module, policy: Policy, override: bool = False) -> None:
    """Give an attention a policy; one that learns is known to PEFT as something that is trained and saved."""
    kind = Site
    if is_learned(policy) and find_spec("peft") is not None:
        from attnscale.hf.adapters import TrainedSite

        kind = TrainedSite
    module.add_module(CHILD, kind(policy, override))


def leave_alone(module: nn.Module) -> None:
    """Note in an attention that it has no policy; the note goes with copies of it."""
    module.register_module(CHILD, None)


def remove_site(module: nn.Module) -> None:
    """Take site or note away again, and undo what came with it."""
    site = module._modules.pop(CHILD, None)
    if not isinstance(site, Site):
        return
    for restore in reversed(site.undo):
        restore()
    if site.override:
        from attnscale.hf.interface import release_sdpa

        release_sdpa(site)
