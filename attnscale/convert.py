"""Convert every `nn.MultiheadAttention` of a torch model to ours, reversibly."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnscale._util.handles import Removable
from attnscale.errors import ArgumentError, reject_type
from attnscale.policies import Policy, PolicySpec, build_policy_for


class Conversion(Removable):
    """What `convert` did to a model. `remove()` undoes it; as a context manager it does so at the end.

    `policies` maps the module path of each converted attention to its policy.
    """

    def __init__(self, model: nn.Module, found: dict[str, nn.MultiheadAttention], policies: dict[str, Policy]) -> None:
        from attnscale.module import MultiheadAttention

        self.model = model
        self.policies = policies
        self._converted = list(found.values())
        # Encoders may turn padded batches into nested tensors for the fused path that is now closed.
        encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
        self._nested = [encoder for encoder in encoders if encoder.use_nested_tensor]
        for name, module in found.items():
            # Changing the class keeps the module itself: parameters, hooks, optimizer state and shared references.
            module.__class__ = MultiheadAttention
            module.adopt(policies[name])  # type: ignore[operator]
        for encoder in self._nested:
            encoder.use_nested_tensor = False

    def remove(self) -> None:
        """Restore the model; parameters keep their values, and monitors are detached. Idempotent."""
        for module in self._converted:
            vars(module).pop("tap", None)
            module.discard_policy()  # type: ignore[operator]
            module.__class__ = nn.MultiheadAttention
        for encoder in self._nested:
            encoder.use_nested_tensor = True
        self._converted, self._nested = [], []


def convert(model: nn.Module, policy: PolicySpec, **parameters: Any) -> Conversion:
    """Give every `torch.nn.MultiheadAttention` of a model a temperature policy, in place and reversibly.

    Each module gets a policy of its own, with `num_heads` and `head_dim` filled in; for one that learns, build the
    optimizer afterwards. Subclasses of torch's module are left alone, since they compute something else.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(32, nhead=4, batch_first=True)
    >>> with convert(model, "log", reference_length=512) as conversion:
    ...     _ = model(torch.randn(1, 8, 32))
    >>> list(conversion.policies)
    ['self_attn']
    """
    from attnscale.module import MultiheadAttention

    if not isinstance(model, nn.Module):
        reject_type("model", model, "a torch.nn.Module, before the policy")
    found = {name: module for name, module in model.named_modules() if type(module) is nn.MultiheadAttention}
    if not found:
        already = any(isinstance(module, MultiheadAttention) for module in model.modules())
        raise ArgumentError(
            f"model={type(model).__name__} is not accepted: expected at least one torch.nn.MultiheadAttention"
            + (", and those it has are converted already" if already else "")
        )
    policies = {
        name: build_policy_for(policy, num_heads=module.num_heads, head_dim=module.head_dim, **parameters)
        for name, module in found.items()
    }
    return Conversion(model, found, policies)
