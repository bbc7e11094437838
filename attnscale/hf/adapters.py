"""Learned policies beside PEFT's adapters: trained, saved and loaded with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from attnscale.hf.record import DESCRIPTION, describe
from attnscale.hf.sites import Site
from attnscale.policies import Policy


class TrainedSite(AuxiliaryTrainingWrapper, Site):
    """A site whose policy learns, as PEFT knows what it trains and saves in full beside its adapters.

    PEFT finds such modules by their class when it freezes a model, saves an adapter or loads one. There is one policy,
    whatever adapters there are: it acts with each of them, and also while adapters are disabled.
    """

    def __init__(self, policy: Policy, override: bool = False) -> None:
        # Not PEFT's, which wraps a module and makes a copy of it for each adapter.
        Site.__init__(self, policy, override)
        self._adapters: set[str] = set()
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    __getattr__ = nn.Module.__getattr__

    def forward(self, *args: Any, adapter_names: object = None, **kwargs: Any) -> Tensor:
        """Attention; the adapters of a mixed batch share the policy."""
        return Site.forward(self, *args, **kwargs)

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        """Take part in whichever adapters are made active."""
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        self._adapters.update(names)
        self._active_adapter = names
        return names[0] if names else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Be trained, or frozen, as the adapters are that become active."""
        self.set_requires_grad(adapter_names, not inference_mode)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Be trained, or frozen."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """Without that adapter the policy stays."""
        self._adapters.discard(adapter_name)
        self._active_adapter = list(new_active_adapters or [])

    def adapter_state_dict(  # type: ignore[override]
        self, adapter_name: str, state_dict: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What an adapter file holds of this module: the parameters, and which policy they belong to."""
        text = json.dumps(describe(self.policy)).encode()
        description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return {name: value for name, value in state_dict.items() if name.startswith("policy.")} | {
            DESCRIPTION: description
        }

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """No names to translate: those in the file are those in the model. An adapter without them may be loaded."""
        return {}

    def _get_available_adapters(self) -> set[str]:
        return self._adapters

    @property
    def unload_and_optionally_merge_module(self) -> Any:
        """Hidden, so that unloading the adapters leaves the policy where it is."""
        raise AttributeError("unload_and_optionally_merge_module")
