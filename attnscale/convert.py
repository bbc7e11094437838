"""Reversible conversion of every `nn.MultiheadAttention` in a torch model."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnscale._util.handles import Removable
from attnscale.errors import ArgumentError, reject_type
from attnscale.policies import Policy, PolicySpec, build_policy_for


class Conversion(Removable):
    """Handle returned by `convert`. Call `remove()` or use it as a context manager to restore the model.

    Attributes:
        model: the converted model.
        policies: module path of each converted attention → its policy.
    """

    def __init__(self, model: nn.Module, found: dict[str, nn.MultiheadAttention], policies: dict[str, Policy]) -> None:
        from attnscale.module import MultiheadAttention

        self.model = model
        self.policies = policies
        self._converted = list(found.values())
        # Encoders convert padded batches to nested tensors for torch's fused path, which is now disabled.
        encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
        self._nested = [encoder for encoder in encoders if encoder.use_nested_tensor]
        for name, module in found.items():
            # Changing the class keeps the module object, with parameters, hooks, optimizer state and shared references.
            module.__class__ = MultiheadAttention
            module.adopt(policies[name])  # type: ignore[operator]
        for encoder in self._nested:
            encoder.use_nested_tensor = False

    def remove(self) -> None:
        """Restore the model and detach monitors. Parameters keep their values. Idempotent."""
        for module in self._converted:
            vars(module).pop("tap", None)
            module.discard_policy()  # type: ignore[operator]
            module.__class__ = nn.MultiheadAttention
        for encoder in self._nested:
            encoder.use_nested_tensor = True
        self._converted, self._nested = [], []


def convert(model: nn.Module, policy: PolicySpec, **parameters: Any) -> Conversion:
    """Add a temperature policy to every `torch.nn.MultiheadAttention` of a model, in place and reversibly.

    Each module gets a separate policy. Learned policies add parameters: build the optimizer after the conversion.
    Subclasses of torch's module are skipped, because their computation may differ.

    Args:
        model: a model with at least one `torch.nn.MultiheadAttention`.
        policy: a name, a mapping, a YAML file or a policy object.
        **parameters: policy parameters, such as `reference_length`. `num_heads` and `head_dim` come from each module.

    Returns:
        A `Conversion`. `remove()` restores the model; the handle is also a context manager.

    Raises:
        ArgumentError: the model has no module to convert, or a policy parameter is not accepted.
        ArgumentTypeError: `model` is not a `torch.nn.Module`.

    Example:
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
            + ("; all of them are already converted" if already else "")
        )
    policies = {
        name: build_policy_for(policy, num_heads=module.num_heads, head_dim=module.head_dim, **parameters)
        for name, module in found.items()
    }
    return Conversion(model, found, policies)
