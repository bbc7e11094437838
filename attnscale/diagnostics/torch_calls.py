"""Calls of torch's own attention function, reported under the path of the module whose forward pass makes them.

Hooks mark the running module of each thread, and a patch of torch's function reports its calls to the taps of that
module. torch.compile traces both. It reaches a tap through the hook of its module, so equal blocks share a graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from attnscale.call.tap import Tap, enter_module, leave_all_modules, leave_module
from attnscale.diagnostics.autograd import run_reported
from attnscale.diagnostics.delivery import Notices
from attnscale.diagnostics.listener import LayerListener
from attnscale.diagnostics.records.record import Record
from attnscale.errors import reject
from attnscale.patch_torch import TorchPatch

# Calls with a name of their own in one forward pass of a module. The last name covers all further calls, as in a loop
# over documents.
NAMED_CALLS = 4
# One key for the hooks of all modules: torch.compile guards on it, and other keys would need a graph of their own.
KEY = "attnscale"
# A module whose forward pass is defined here makes no call itself.
_CALL_NOTHING = ("torch.nn.", "torch._dynamo.", "torch.jit.", "attnscale.")


class TorchCalls:
    """Reports the calls of `torch.nn.functional.scaled_dot_product_attention` in a model until `remove()`.

    Args:
        model: the model.
        listen: builds the listener of a layer from its name and module. The first call in a forward pass of a module
            has the path of the module as its name, the second one `path#2`.
        layers: listeners of attention modules that report their calls themselves, by path. A module with one of these
            paths shares its listener.

    Attributes:
        listeners: listeners by name, in the order of the model's modules. Most of them never receive a call.

    Raises:
        ArgumentError: another monitor is attached to a module of the model.
    """

    def __init__(
        self, model: nn.Module, listen: Callable[[str, nn.Module], LayerListener], layers: Mapping[str, LayerListener]
    ) -> None:
        self.listeners: dict[str, LayerListener] = {}
        self._model = model
        self._alone = not layers
        self._hooked = calling_modules(model)
        if any(isinstance(_hooks_of(module)[0].get(KEY), _Enter) for module in self._hooked.values()):
            reject("model", type(model).__name__, "a model without an attached monitor; close the other monitor first")
        for path, module in self._hooked.items():
            names = [path, *(f"{path}#{number}" for number in range(2, NAMED_CALLS + 1))]
            here = {name: layers[name] if name in layers else listen(name, module) for name in names}
            self.listeners |= here
            enter, leave, always = _hooks_of(module)
            enter[KEY], leave[KEY] = _Enter([Tap(listener, run_reported) for listener in here.values()]), _Leave()
            always[KEY] = True
        patch = TorchPatch(None, model.modules()) if self._hooked else None
        # Also if the monitor is dropped without `close()`.
        self._finalizer = weakref.finalize(self, _restore, patch, [weakref.ref(x) for x in self._hooked.values()])

    def note_unseen(self, records: Iterable[Record], notices: Notices) -> None:
        """Add a warning about attention of which a measured step has no record, with its remedy."""
        measured = {record.layer for record in records}
        skipped = any(listener.skipped for listener in self.listeners.values())
        compiled = is_compiled(self._model)
        ran = compiled or any(_hooks_of(module)[0][KEY].entered for module in self._hooked.values())
        if self._alone and ran and not measured and not skipped:
            remedy = "Call it in place of softmax, flex_attention or xformers"
            if compiled:
                remedy = "If the model was compiled before the monitor was created, call torch.compiler.reset()"
            notices.add(
                "no call",
                f"{type(self._model).__name__} has no attention that was measured: none of its modules called "
                f"torch.nn.functional.scaled_dot_product_attention. {remedy}",
            )
        unconverted = {path for path, module in self._hooked.items() if is_unconverted(module)}
        for path in sorted(unconverted - measured)[:1]:
            notices.add(
                "unconverted",
                f"{path} was not measured, because it is a torch.nn.MultiheadAttention. "
                'Call attnscale.convert(model, "constant") before the monitor is created',
            )

    def remove(self) -> None:
        """Restore torch's function and the hooks of the modules. Idempotent."""
        self._finalizer()
        leave_all_modules()


def _restore(patch: TorchPatch | None, hooked: Iterable[weakref.ref[nn.Module]]) -> None:
    for module in filter(None, (reference() for reference in hooked)):
        for hooks in _hooks_of(module):
            hooks.pop(KEY, None)
    if patch is not None:
        patch.remove()


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Return the hooks before and after a forward pass, and the keys of those that run after an exception too."""
    hooks: Any = module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called
    return hooks  # type: ignore[no-any-return]


def calling_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model, by path, that may call torch's attention function in their forward pass.

    Stock `nn.MultiheadAttention` is one of them: it calls the function if no weights are requested.
    """
    return {path or type(module).__name__: module for path, module in model.named_modules() if _may_call(module)}


def _may_call(module: nn.Module) -> bool:
    if is_unconverted(module):
        return True
    origin = getattr(vars(module).get("forward", type(module).forward), "__module__", None) or ""
    return not origin.startswith(_CALL_NOTHING) and not isinstance(module, torch.jit.ScriptModule)


def is_unconverted(module: nn.Module) -> bool:
    """Whether a module is a torch.nn.MultiheadAttention that `attnscale.convert` would convert."""
    return type(module) is nn.MultiheadAttention


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or one of its modules is compiled."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class _Hook:
    """Base class of the hooks. A copy of a hook does nothing, and can be loaded without this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # a function that takes anything and returns None


class _Enter(_Hook):
    """Pre-hook: marks the start of the forward pass of a module. `entered`: it has run at least once, uncompiled."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self.taps = taps
        self.entered = False

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.entered = True
        enter_module(module, self.taps)


class _Leave(_Hook):
    """Hook: marks the end of the forward pass of a module, also after an exception."""

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        leave_module(module)
