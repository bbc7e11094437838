"""Sites whose policies PEFT trains and saves together with its adapters."""

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
    """Site of a class that PEFT trains and saves in full with its adapters.

    All adapters share one policy, which stays active while adapters are disabled.
    """

    def __init__(self, policy: Policy, override: bool = False, on_existing: str = "raise") -> None:
        # PEFT's __init__ would wrap a module and copy it for each adapter.
        Site.__init__(self, policy, override)
        self.on_existing = on_existing
        self._adapters: set[str] = set()
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    __getattr__ = nn.Module.__getattr__

    def forward(self, *args: Any, adapter_names: object = None, **kwargs: Any) -> Tensor:
        """Compute attention; all adapters of a mixed batch share the policy."""
        return Site.forward(self, *args, **kwargs)

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        """Register the adapters that become active."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        self._adapters.update(names)
        self._active_adapter = names
        return names[0] if names else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        self.set_requires_grad(adapter_names, not inference_mode)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Train or freeze the policy. As in PEFT, half-precision parameters are trained in fp32."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
            if requires_grad and parameter.dtype.itemsize == 2:
                parameter.data = parameter.data.float()

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """Unregister an adapter; the policy stays."""
        self._adapters.discard(adapter_name)
        self._active_adapter = list(new_active_adapters or [])

    def adapter_state_dict(  # type: ignore[override]
        self, adapter_name: str, state_dict: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tensors for the adapter file: the learned values of the policy, and its description as bytes."""
        described = describe(self.policy) | ({} if self.on_existing == "raise" else {ON_EXISTING: self.on_existing})
        text = bytearray(json.dumps(described).encode())
        # A caller may pass a state dict without the parameters of the policy.
        own = self.policy.state_dict(prefix="policy.") if isinstance(self.policy, nn.Module) else {}
        given = {name: value for name, value in state_dict.items() if name.startswith("policy.")}
        return own | given | {DESCRIPTION: torch.frombuffer(text, dtype=torch.uint8)}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """Return no names to translate, so that an adapter file without a policy can be loaded."""
        return {}

    def _get_available_adapters(self) -> set[str]:
        return self._adapters

    @property
    def unload_and_optionally_merge_module(self) -> Any:
        """Hidden from PEFT, so that unloading adapters keeps the policy."""
        raise AttributeError("unload_and_optionally_merge_module")
