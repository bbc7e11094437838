"""Sites: the child module that holds the policy of an attention module, and computes its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnscale._util import state
from attnscale.hf.attention import attend
from attnscale.module import ScaledDotProductAttention
from attnscale.policies import Policy, build_policy

# Our name as attention implementation, as entry of a config, and as child of an attention module: the parameters of
# `model.layers.0.self_attn.attnscale` are part of the checkpoint.
NAME = "attnscale"
SDPA = "sdpa"

Undo = Callable[[], None]


class Site(ScaledDotProductAttention):
    """The child of an attention module of transformers that computes for it, with a policy.

    `undo` is what to undo when the site is removed, kept here so that a copy of the model can be restored too. With
    `override` the site is also called by modules whose implementation is "sdpa".
    """

    def __init__(self, policy: Policy, override: bool = False) -> None:
        super().__init__(policy)
        self.undo: list[Undo] = []
        self.override = override
        self._override_sdpa()

    def __setstate__(self, values: dict[str, Any]) -> None:
        """Copies and unpickled sites override "sdpa" as the original does."""
        super().__setstate__(values)  # type: ignore[no-untyped-call]
        self._override_sdpa()

    def _override_sdpa(self) -> None:
        if not self.override:
            return
        entry = ALL_ATTENTION_FUNCTIONS[SDPA]
        if not isinstance(entry, SdpaOrSite):
            AttentionInterface.register(SDPA, SdpaOrSite(entry))
        state.HF_HOLDERS.add(self)


class MonitoredSite(Site):
    """A site without a policy of its own, added to a stock model while a monitor listens: plain attention.

    A copy of the model is not listened to, and gets None in its place.
    """

    def __init__(self, cross: bool) -> None:
        super().__init__(build_policy("constant"), override=True)
        self.cross = cross

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # used by deepcopy too


@dataclass(frozen=True)
class SdpaOrSite:
    """The implementation "sdpa" while a site overrides it: `stock` for modules without such a site."""

    stock: Callable[..., tuple[Tensor, Tensor | None]]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attention of a module; further arguments are those of `attend`."""
        site = module._modules.get(NAME)
        if isinstance(site, Site) and site.override:
            return attend(site, module, *args, **kwargs)
        return self.stock(module, *args, **kwargs)


def site_of(module: nn.Module) -> Site | None:
    """The site of an attention module, if it has one."""
    return cast("Site | None", module._modules.get(NAME))


def is_called(site: Site, module: nn.Module) -> bool:
    """Whether the site of an attention module is called, which the implementation in its config decides."""
    implementation = getattr(module.config, "_attn_implementation", None)
    overridden = isinstance(ALL_ATTENTION_FUNCTIONS[SDPA], SdpaOrSite)
    return implementation == NAME or (implementation == SDPA and overridden and site.override)


def is_decided(module: nn.Module) -> bool:
    """Whether an attention module has a site, or the note that it has none: None in the place of a site."""
    return NAME in module._modules


def remove_site(module: nn.Module) -> None:
    """Remove the site or note of an attention module, and undo what came with the site.

    The last site that overrides "sdpa" restores transformers' own.
    """
    site = module._modules.pop(NAME, None)
    if not isinstance(site, Site):
        return
    for undo in reversed(site.undo):
        undo()
    state.HF_HOLDERS.discard(site)
    entry = ALL_ATTENTION_FUNCTIONS[SDPA]
    if site.override and not state.HF_HOLDERS and isinstance(entry, SdpaOrSite):
        AttentionInterface.register(SDPA, entry.stock)


def is_learned(policy: Policy) -> bool:
    """Whether a policy has parameters or buffers, which a checkpoint has to hold."""
    return isinstance(policy, nn.Module) and bool(policy.state_dict())
