"""Temperature policies for code you cannot edit: a reversible patch of torch's attention functions."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from attnscale._util import state
from attnscale._util.handles import Removable
from attnscale.attention import attention_and_weights, attention_through, report_attention
from attnscale.call.tap import next_tap
from attnscale.call.torch_arguments import TORCH_ATTENTION, is_causal_bias
from attnscale.errors import BackendError
from attnscale.policies import Policy, PolicySpec, build_policy

_ATTENTION = "scaled_dot_product_attention"
_MULTIHEAD = "multi_head_attention_forward"


def patch_torch(policy: PolicySpec, **parameters: Any) -> TorchPatch:
    """Apply a policy to every call of torch's `scaled_dot_product_attention`.

    The patch covers references imported by name (`from torch.nn.functional import ...`) and
    `torch.nn.MultiheadAttention`, with and without weights. torch's fused inference path for encoders is disabled,
    because it ignores the policy. All calls share one policy and its parameters.

    Not covered: code with its own softmax, and graphs compiled before the patch. `torch.jit.script` raises a
    `BackendError` unless β is 1, because TorchScript cannot compile a policy.

    Args:
        policy: a name, a mapping, a YAML file or a policy object.
        **parameters: policy parameters, such as `reference_length`.

    Returns:
        A `TorchPatch`. `remove()` restores torch's functions; the handle is also a context manager.

    Raises:
        ArgumentError: the policy or one of its parameters is not accepted.

    Example:
        >>> q = torch.randn(1, 2, 16, 8)
        >>> with patch_torch("log", reference_length=4):
        ...     sharper = F.scaled_dot_product_attention(q, q, q)
        >>> torch.equal(sharper, F.scaled_dot_product_attention(q, q, q))
        False
    """
    return TorchPatch(build_policy(policy, **parameters))


class TorchPatch(Removable):
    """Handle returned by `patch_torch`. Call `remove()` or use it as a context manager to restore torch.

    Patches can be nested and removed in any order. A removed patch beneath another one forwards its calls. Under a
    monitor, calls are reported to the module whose forward pass makes them.

    Args:
        policy: the policy of all patched calls. None for a monitor, which does not change the computation.
        holders: objects whose attributes may refer to torch's function too. They are referenced weakly.

    Attributes:
        policy: the policy of all patched calls.
        active: True until `remove()`.
    """

    def __init__(self, policy: Policy | None, holders: Iterable[object] = ()) -> None:
        self.policy = policy
        self.active = True
        self._fused_path_was_open = True
        self._holders = [weakref.ref(holder) for holder in holders]
        self._functions: list[Any] = []
        self._captured = threading.local()
        self._beneath = F.scaled_dot_product_attention
        self._patch_beneath: TorchPatch | None = getattr(self._beneath, "patch", None)
        self._replace(_ATTENTION, self._attention)
        state.TORCH_REPLACED.append(self._beneath)
        if policy is not None and policy.uniform != 1.0:
            self._replace(_MULTIHEAD, self._multihead)
            closing: list[TorchPatch] = state.CLOSED_FUSED_PATHS
            if closing:
                self._fused_path_was_open = closing[0]._fused_path_was_open
            else:
                self._fused_path_was_open = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            closing.append(self)

    def remove(self) -> None:
        """Restore torch's original functions at every patched reference. Idempotent."""
        if not self.active:
            return
        self.active = False
        for ours in self._functions:
            for namespace, name in self._references(ours):
                namespace[name] = _before(ours)
        _forget_unfinished_scripts()
        state.TORCH_REPLACED.remove(self._beneath)
        if self in state.CLOSED_FUSED_PATHS:
            state.CLOSED_FUSED_PATHS.remove(self)
            if not state.CLOSED_FUSED_PATHS:
                torch.backends.mha.set_fastpath_enabled(self._fused_path_was_open)

    def _replace(self, function: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a torch function in `torch.nn.functional` and in every module outside torch that refers to it."""
        before = getattr(F, function)
        ours: Any = make(before)
        ours.replaces, ours.patch = before, self
        ours.__prepare_scriptable__ = functools.partial(self._prepare_script, before)
        self._functions.append(ours)
        for namespace, name in self._references(before):
            namespace[name] = ours

    def _references(self, function: Any) -> list[tuple[dict[str, Any], str]]:
        """Return the namespaces and names of all references to a function that a patch covers."""
        loaded = list(sys.modules.items())
        foreign = [x for name, x in loaded if not name.startswith(("torch.", "attnscale.")) or x is F]
        found = []
        for owner in (*foreign, *(holder() for holder in self._holders)):
            namespace = getattr(owner, "__dict__", None)
            if isinstance(namespace, dict):
                found += [(namespace, name) for name, value in list(namespace.items()) if value is function]
        return found

    def _attention(self, before: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            *,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
            if not self.active or self._is_left_to_another():
                return before(query, key, value, attn_mask, dropout_p, is_causal, **options)
            if self._is_overridden(query, key, value, attn_mask):
                given = (query, key, value, attn_mask)
                handle: Any = handle_torch_function  # typed for functions with keywords only
                overridden: Tensor = handle(attend, given, *given, dropout_p, is_causal, **options)
                return overridden
            tap = next_tap()
            if self.policy is None:
                compute = before if tap is None else functools.partial(report_attention, tap, before)
                return compute(query, key, value, attn_mask, dropout_p, is_causal, **options)
            options["policy"] = self.policy
            if getattr(self._captured, "wanted", False):
                rules: dict[str, Any] = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
                output, self._captured.weights = attention_and_weights(tap, query, key, value, **rules, **options)
                return output
            return attention_through(None if query.is_nested else tap)(
                query, key, value, attn_mask, dropout_p, is_causal, **options
            )

        # The name of torch's function: context parallelism looks it up, pickle and torch.fx record it.
        attend.__name__ = attend.__qualname__ = _ATTENTION
        attend.__module__, attend.__doc__ = F.__name__, before.__doc__
        return attend

    def _is_left_to_another(self) -> bool:
        """Whether another patch computes and reports the call: a monitor's patch forwards to any patch beneath it."""
        patch = self._patch_beneath if self.policy is None else None
        while patch is not None and not patch.active:
            patch = patch._patch_beneath
        return patch is not None

    def _prepare_script(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.jit.script` calls this hook and compiles the function it returns."""
        if not self.active and before is not TORCH_ATTENTION:
            prepare: Callable[[], Any] | None = getattr(before, "__prepare_scriptable__", None)
            return before if prepare is None else prepare()
        if not self.active or self.policy is None or self.policy.uniform == 1.0:
            return _torch_attention
        _forget_unfinished_scripts()
        raise BackendError(
            f"torch.jit.script cannot compile attention under patch_torch({self.policy!r}) and would ignore the "
            "policy: call remove() first, or use torch.compile or torch.export"
        )

    def _is_overridden(self, *tensors: Any) -> bool:
        """Whether a tensor subclass or a torch.fx proxy handles the call in its `__torch_function__`.

        Nested tensors are excluded: they handle only torch's original function. A causal bias is excluded under a
        temperature, because its kernels would ignore β.
        """
        if not has_torch_function(tensors) or any(isinstance(x, Tensor) and x.is_nested for x in tensors):
            return False
        return self.policy is None or self.policy.uniform == 1.0 or not is_causal_bias(tensors[-1])

    def _multihead(self, before: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., Any]:
        """Wrap torch's multi-head function, which bypasses the attention function if weights are requested.

        The wrapper requests the output only. The patched attention function, called in the same thread, stores the
        weights in `_captured`.
        """

        names = list(inspect.signature(before).parameters)

        @functools.wraps(before)
        def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            given = dict(zip(names, args, strict=False)) | kwargs
            if not self.active or not given.get("need_weights", True):
                return before(*args, **kwargs)
            self._captured.wanted = True
            try:
                output, _ = before(**(given | {"need_weights": False}))
                weights = self._captured.__dict__.pop("weights")  # [B, H, Tq, Tk]
            finally:
                self._captured.wanted = False
            if given.get("average_attn_weights", True):
                weights = weights.mean(1)
            return output, weights.to(output.dtype) if output.dim() == 3 else weights[0].to(output.dtype)

        return forward


def _before(function: Any) -> Any:
    """The function beneath a patched one, skipping removed patches."""
    while hasattr(function, "patch") and not function.patch.active:
        function = function.replaces
    return function


def _torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function for TorchScript, which does not support keyword-only arguments."""
    return TORCH_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _forget_unfinished_scripts() -> None:
    """Remove module types that failed to compile from the cache of `torch.jit.script`.

    The next attempt would reuse the partly compiled type and fail with "Can't redefine method".
    """
    store = torch.jit._recursive.concrete_type_store
    for known in store.type_store.values():
        known[:] = [found for found in known if found in store.methods_compiled]
