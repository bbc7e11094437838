"""What was done to a model, and how to undo it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from attnscale.hf.configs import release
from attnscale.hf.sites import CHILD, remove_site
from attnscale.policies import Policy


class Handle:
    """The policies of a model. `remove()` takes them away; as a context manager it does so at the end.

    `policies` maps the path of each attention that has one to its policy; `record` is what the config says of them.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, Policy],
        record: Mapping[str, Any],
        modules: Sequence[nn.Module],
        configs: Sequence[PreTrainedConfig],
    ) -> None:
        self.model = model
        self.policies = dict(policies)
        self.record = dict(record)
        self._sites = [(module, module._modules.get(CHILD)) for module in modules]
        self._configs = list(configs)

    def parameters(self) -> list[nn.Parameter]:
        """What the policies learn: give these to the optimizer to train them alone."""
        found = [p for policy in self.policies.values() if isinstance(policy, nn.Module) for p in policy.parameters()]
        return list(dict.fromkeys(found))

    def save(self, folder: str | Path) -> None:
        """Write the policies and what they have learned, without the model: a few kB for `attnscale.hf.load_policy`.

            handle.save("run/policy")
            handle = attnscale.hf.load_policy(model, "run/policy")

        A file is written whole or not at all.
        """
        from attnscale.hf.policy_files import save_policy  # which knows this class

        save_policy(self, folder)

    def remove(self) -> None:
        """Restore the model as it was, to the bit. Idempotent, also after another handle of the same policies."""
        if any(site is not None and module._modules.get(CHILD) is site for module, site in self._sites):
            take_out([module for module, _ in self._sites], self._configs)
        self._sites, self._configs = [], []

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def take_out(modules: Sequence[nn.Module], configs: Sequence[PreTrainedConfig]) -> None:
    """Restore attention modules, the last first, and then the configs that they ask."""
    for module in reversed(modules):
        remove_site(module)
    for config in configs:
        release(config)
