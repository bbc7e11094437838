"""Monitoring of transformers models: discovery of their attention, and a callback for the Trainer's logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState

from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.records.report import Report
from attnscale.diagnostics.views.flatten import PREFIX, compact, overview
from attnscale.errors import reject_type
from attnscale.hf.attach import attach
from attnscale.hf.attention_layers import find_attention_layers, name_layers, reject_model
from attnscale.hf.config_record import is_pending
from attnscale.hf.selection import INDEXED_KEYS, OWN_ATTENTION, reject_model_without_attention
from attnscale.hf.sites import SDPA, MonitoredSite, remove_site, site_of
from attnscale.policies.record import NAME

log = logging.getLogger(__name__)


def find_sites(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sites of a model loaded as "attnscale", after installing its pending policies.

    Also sets the attribute `cross` of all sites of the model.
    """
    if not _has_pretrained(model):
        return
    if is_pending(model):
        for path in attach(model).policies:
            yield path, model.get_submodule(f"{path}.{NAME}")
    for layer in find_attention_layers(model):
        site = site_of(layer.module)
        if site is not None:
            site.cross = layer.cross


def open_stock_attention(model: nn.Module, undo: ExitStack) -> dict[str, nn.Module]:
    """Add a measurable site to every attention module with implementation "sdpa", until `undo` is closed.

    The site calls torch's attention as transformers does; results stay bit-identical. Raises for a transformers model
    without such attention.
    """
    if not _has_pretrained(model):
        return {}
    layers = find_attention_layers(model)
    free = [layer for layer in layers if layer.routed and not layer.sparse and site_of(layer.module) is None]
    usable = [layer for layer in free if layer.config._attn_implementation == SDPA]
    if not layers:
        reject_model_without_attention(model)
    if not usable:
        routed = [layer for layer in layers if layer.routed and not layer.sparse]
        if not routed:
            reason = INDEXED_KEYS if layers[0].routed else OWN_ATTENTION
            advice = "call an attnscale.ScaledDotProductAttention in its forward method"
            reject_model(model, f"{reason}, which a monitor cannot measure; {advice}", layers)
        names = " and ".join(sorted({repr(layer.config._attn_implementation) for layer in routed}))
        advice = "which is attention with β = 1, or load the model with attn_implementation='sdpa'"
        call = "call attnscale.hf.apply(model, 'constant') first"
        reject_model(model, f"a monitor cannot measure attn_implementation={names}; {call}, {advice}")
    others = [layer for layer in layers if layer not in usable]
    if others:
        log.warning("attnscale: cannot monitor %s, of %d attention modules", name_layers(others), len(layers))
    found: dict[str, nn.Module] = {}
    for layer in usable:
        found[layer.path] = site = MonitoredSite(layer.cross)
        layer.module.add_module(NAME, site)
        undo.callback(remove_site, layer.module)
    return found


def _has_pretrained(model: nn.Module) -> bool:
    return any(isinstance(module, PreTrainedModel) for module in model.modules())


class AttnScaleCallback(TrainerCallback):
    """Trainer callback that steps a monitor and adds its values to the Trainer's logs.

    The printed line and the log history get four numbers of the whole model: `attn/max_logit`, `attn/entropy_share`
    (mean of entropy / ln n), `attn/min_gain` and `attn/events`, the number of open events. TensorBoard, W&B and the
    Trainer's other trackers also get the main quantities of every layer. Learning rate and last logged loss are passed
    to the monitor.

    The Trainer runs reporting callbacks (TensorBoard, W&B, …) before user callbacks. `attach` inserts this callback
    in front of them; `trainer.add_callback` would be too late. The monitor is closed when training ends.

    Args:
        monitor: the monitor of the model.
        heads: add the mean of every head to the statistics of every layer.

    Raises:
        ArgumentTypeError: `monitor` is not an `attnscale.Monitor`.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        >>> callback = attnscale.hf.AttnScaleCallback(attnscale.Monitor(model, every=50))
        >>> callback.attach(trainer)  # doctest: +SKIP
        >>> callback.monitor.close()
    """

    def __init__(self, monitor: Monitor, *, heads: bool = False) -> None:
        if not isinstance(monitor, Monitor):
            reject_type("monitor", monitor, "an attnscale.Monitor")
        self.monitor = monitor
        self.heads = heads
        self._short: dict[str, float] = {}
        self._details: dict[str, float] = {}
        self._loss: float | None = None

    def attach(self, trainer: Trainer) -> AttnScaleCallback:
        """Insert this as the first callback of a `transformers.Trainer` and return it.

        Raises:
            ArgumentTypeError: `trainer` is not a `transformers.Trainer`.
        """
        if not isinstance(trainer, Trainer):
            reject_type("trainer", trainer, "a transformers.Trainer")
        callbacks = trainer.callback_handler.callbacks
        others = [one for one in callbacks if one is not self and not isinstance(one, _WithoutDetails)]
        printers = [index for index, one in enumerate(others) if isinstance(one, (PrinterCallback, ProgressCallback))]
        others.insert(min(printers, default=len(others)), _WithoutDetails())
        callbacks[:] = [self, *others]
        return self

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Step the monitor after an optimizer step."""
        rates = getattr(kwargs.get("lr_scheduler"), "get_last_lr", lambda: [None])()
        records = self.monitor.step(state.global_step, loss=self._loss, lr=rates[0])
        if records:
            found = overview(Report.of(records, state.global_step))
            numbers = {
                "max_logit": found.max_logit and found.max_logit.value,
                "entropy_share": found.entropy_share,
                "min_gain": found.min_gain and found.min_gain.value,
                "events": len(self.monitor.events),
            }
            self._short = {f"{PREFIX}/{name}": value for name, value in numbers.items() if value is not None}
            self._details = compact(records, heads=self.heads)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the values to the log, and the short ones to the log history, which holds a copy of the log."""
        if logs is None or "loss" not in logs:
            return  # log of an evaluation, or the final summary
        self._loss = logs["loss"] if isinstance(logs["loss"], float) else None
        logs.update(self._short | self._details)
        if state.log_history:
            state.log_history[-1].update(self._short)
        self._short, self._details = {}, {}

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Close the monitor."""
        self.monitor.close()


class _WithoutDetails(TrainerCallback):
    """Removes the values of layers from the log before it is printed. All callbacks receive the same dictionary."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in [name for name in logs or () if name.startswith(f"{PREFIX}/") and name.count("/") > 1]:
            del logs[name]
