"""Sites whose policies PEFT saves together with its adapters, and trains where they learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from attnscale.hf.sites import Site
from attnscale.policies import Policy
from attnscale.policies.record import DESCRIPTION, ON_EXISTING, describe


class PeftSite(AuxiliaryTrainingWrapper, Site):
    """A site of a class that PEFT recognises as trained and saved in full beside its adapters.

    There is one policy for all adapters; it acts with each of them, and also while adapters are disabled.
    """

    def __init__(self, policy: Policy, override: bool = False, on_existing: str = "raise") -> None:
        # PEFT's own __init__ would wrap a module and copy it for each adapter.
        Site.__init__(self, policy, override)
        self.on_existing = on_existing
        self._adapters: set[str] = set()
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    __getattr__ = nn.Module.__getattr__

    def forward(self, *args: Any, adapter_names: object = None, **kwargs: Any) -> Tensor:
        """Attention; all adapters of a mixed batch share the policy."""
        return Site.forward(self, *args, **kwargs)

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        """Belong to whichever adapters are made active."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        self._adapters.update(names)
        self._active_adapter = names
        return names[0] if names else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        self.set_requires_grad(adapter_names, not inference_mode)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Train or freeze the policy; what PEFT trains in a half precision model, it trains in fp32."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
            if requires_grad and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """Forget an adapter; the policy stays."""
        self._adapters.discard(adapter_name)
        self._active_adapter = list(new_active_adapters or [])

    def adapter_state_dict(  # type: ignore[override]
        self, adapter_name: str, state_dict: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The tensors for the adapter's file: what the policy has learned, and its description as bytes."""
        described = describe(self.policy) | ({} if self.on_existing == "raise" else {ON_EXISTING: self.on_existing})
        text = bytearray(json.dumps(described).encode())
        # A caller may pass a state dict of the adapter's own parameters only.
        own = self.policy.state_dict(prefix="policy.") if isinstance(self.policy, nn.Module) else {}
        given = {name: value for name, value in state_dict.items() if name.startswith("policy.")}
        return own | given | {DESCRIPTION: torch.frombuffer(text, dtype=torch.uint8)}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """No names to translate; so an adapter file without a policy loads too."""
        return {}

    def _get_available_adapters(self) -> set[str]:
        return self._adapters

    @property
    def unload_and_optionally_merge_module(self) -> Any:
        """Hidden from PEFT, so that unloading the adapters keeps the policy."""
        raise AttributeError("unload_and_optionally_merge_module")
