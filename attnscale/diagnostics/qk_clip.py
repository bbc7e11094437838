"""QK-clip (MuonClip): after an optimizer step, rescale the query and key projections of heads with too large logits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from attnscale._util.checks import check_flag, read_number
from attnscale._util.handles import Uncopied
from attnscale._util.tracing import is_dtensor
from attnscale.diagnostics.monitor import Monitor
from attnscale.diagnostics.projections import HeadShape, Layout, find_layout, holders, parameter_factors
from attnscale.diagnostics.tracking import LogitTracker
from attnscale.errors import ArgumentError, reject, reject_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Clipped(NamedTuple):
    """A head whose largest logit exceeded τ.

    Args:
        layer: path of the attention module.
        head: index of the head in the layer.
        max_logit: largest logit of the step, over all rows and processes.
        factor: γ = τ / max_logit, by which its logits are scaled.

    Example:
        >>> Clipped("layers.0", 3, 200.0, 0.5).factor
        0.5
    """

    layer: str
    head: int
    max_logit: float
    factor: float


class QKClip(Uncopied, contextlib.AbstractContextManager["QKClip"]):
    """Bounds the attention logits of a model in training, head by head. attnscale/diagnostics/README.md is the guide.

    Call `step` after each `optimizer.step()`. A head whose largest logit of this step exceeded τ gets its logits scaled
    by γ = τ / max: its rows of W_q by γ^α, its rows of W_k by γ^(1−α), biases included. Query heads that share a key
    head share the factor of W_k, and W_q takes the rest. In latent attention (DeepSeek) the shared rotary key stays
    unchanged, and the rotary part of W_q is scaled by γ. Other heads are not changed at all. The forward and backward
    pass are not affected. Logits have exactly the factor γ where they are linear in q·k; a softcap or an additive bias
    changes that.

    The largest logits are tracked at every step (see `Monitor.max_logits`). An exact pass over the scores is made for
    heads that may exceed τ; on devices other than the CPU for all heads, unless the Triton backend computes the output.

    In a distributed run all processes call `step`, and maxima are reduced. Supported are DDP, `fully_shard` and
    tensor parallelism with `attnscale.distributed.HeadParallel`.

    Args:
        model: a model that `Monitor` accepts, or the `Monitor` of a model, whose tracking is then shared.
        tau: limit of the logits, > 0.
        alpha: share of the queries in the factor, 0 to 1.
        monitoring_only: `step` reports the heads, but changes nothing.
        projections: by path of a layer, for layers with unknown projections: `(q_proj, k_proj)`; one module with the
            rows of q, k and v in turn; `(qkv, "by_head")` if they alternate by head; None to leave the layer out.
        masters: master copies (such as fp32) of parameters, scaled in the same way.
        process_group: as in `Monitor`.

    Raises:
        ArgumentError: an argument is out of range, a layer has unknown projections or normalises its queries or keys,
            or a monitor is attached to the model (pass it instead).
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import attnscale
        >>> attention = attnscale.MultiheadAttention(8, 2, batch_first=True)
        >>> x = 100 * torch.eye(8)[None]
        >>> with QKClip(attention, tau=10.0) as clip:
        ...     _ = attention(x, x, x)
        ...     heads = [clipped.head for clipped in clip.step()]
        ...     _ = attention(x, x, x)
        ...     [round(clipped.max_logit, 3) for clipped in clip.step() if clipped.max_logit > 10.001]
        []
        >>> heads
        [0, 1]
    """

    def __init__(
        self,
        model: nn.Module | Monitor,
        tau: float = 100.0,
        alpha: float = 0.5,
        monitoring_only: bool = False,
        *,
        projections: Mapping[str, object] | None = None,
        masters: Mapping[Tensor, Tensor] | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self.tau = read_number("tau", tau, "a number > 0")
        self.alpha = read_number("alpha", alpha, "a number from 0 to 1")
        if not 0 < self.tau < math.inf:
            reject("tau", tau, "a number > 0")
        if not 0 <= self.alpha <= 1:
            reject("alpha", alpha, "a number from 0 to 1")
        check_flag("monitoring_only", monitoring_only)
        self.monitoring_only = monitoring_only
        self._masters = _read_masters(masters)
        self._closed = False
        self._owned = not isinstance(model, Monitor)
        if isinstance(model, Monitor):
            if process_group is not None:
                reject("process_group", process_group, "None with a Monitor, which has its own")
            self._monitor = model
            self._refuse_closed()
        else:
            self._monitor = Monitor(model, alerts=None, track=False, process_group=process_group)
            self._monitor._listen(False, 0)
        self._given = dict(projections or {})
        self._layers = {layer.name: layer for layer in self._monitor._listeners()}
        try:
            self._layouts = self._find_layouts()
        except BaseException:
            if self._owned:
                self._monitor.close()
            raise
        # Modules that call torch's function are known with their first call, so all that may call it are tracked.
        callers = (
            self._layers.keys() - self._monitor._attention - {path for path, x in self._given.items() if x is None}
        )
        self._trackers = {
            path: LogitTracker(self.tau) for path in self._layers if path in self._layouts or path in callers
        }
        for path, tracker in self._trackers.items():
            self._layers[path].trackers.append(tracker)
        self._shapes: dict[str, HeadShape] = {}

    def _find_layouts(self) -> dict[str, Layout]:
        known = self._monitor._attention
        for path in self._given:
            if path not in self._layers:
                reject("projections", path, f"paths of attention layers: {', '.join(map(repr, known or self._layers))}")
        found: dict[str, Layout] = {}
        for path, attention, holder in holders(self._monitor._model, known):
            layout = find_layout(path, attention, holder, self._given.get(path, ...))
            if layout is not None:
                found[path] = layout
        return found

    def _find_called_layouts(self) -> None:
        """Find the projections of modules whose calls of torch's function have been seen."""
        modules = dict(self._monitor._model.named_modules())
        for path in self._shapes.keys() - self._layouts:
            module = modules.get(path.partition("#")[0], self._monitor._model)
            # Which projections belong to the second call of a module is unknown.
            layout = find_layout(path, module, None if "#" in path else module, self._given.get(path, ...))
            if layout is not None:
                self._layouts[path] = layout

    def step(self) -> list[Clipped]:
        """Rescale the projections of all heads whose largest logit since the last `step` exceeded τ.

        Call this after `optimizer.step()`. In a distributed run it is a collective.

        Returns:
            The heads that were rescaled, or would be with `monitoring_only`, the same on all processes.

        Raises:
            ArgumentError: this object or its monitor is closed, or the projections of a layer do not fit its heads.
        """
        self._refuse_closed()
        largest = self._largest()
        for tracker in self._trackers.values():
            tracker.reset()
        if self._owned:
            for layer in self._layers.values():
                layer.failed = False
            self._monitor._notices.issue()
        clipped: list[Clipped] = []
        for path, tops in largest.items():
            above = (tops > self.tau) & torch.isfinite(tops)
            if not bool(above.any()):
                continue
            factors = torch.where(above, self.tau / tops, 1.0)
            heads = above.nonzero()[:, 0].tolist()
            clipped += [Clipped(path, head, float(tops[head]), float(factors[head])) for head in heads]
            if not self.monitoring_only:
                self._scale(path, factors)
        return clipped

    def close(self) -> None:
        """Stop tracking, and detach from the model unless a monitor was passed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for path, tracker in self._trackers.items():
            trackers = self._layers[path].trackers
            trackers[:] = [other for other in trackers if other is not tracker]
        if self._owned:
            self._monitor.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed or self._monitor._closed:
            owner = "QKClip" if self._closed else "the monitor of this QKClip"
            raise ArgumentError(f"{owner} is closed: expected one that tracks the largest logits")

    @torch.no_grad()
    def _scale(self, path: str, factors: Tensor) -> None:
        """Multiply the projections of a layer, and their master copies, by the factors [H] of its logits."""
        rows = self._layouts[path](self._shapes[path])
        for parameter, axis, of_outputs in parameter_factors(rows, factors, self.alpha):
            for x in (parameter, self._masters.get(parameter)):
                if x is not None:
                    _multiply_outputs(x, of_outputs, axis)

    def _largest(self) -> dict[str, Tensor]:
        """The largest logits [H] of all layers over all processes, in float64 on the CPU; −∞ for heads without calls.

        Exact where they exceed τ, otherwise lower bounds.
        """
        self._learn_shapes()
        found = {path: largest.lower for path, tracker in self._trackers.items() if (largest := tracker.read())}
        found = {path: tops for path, tops in found.items() if path in self._shapes}
        whole = {path: torch.full((shape.heads,), -math.inf, device="cpu") for path, shape in self._shapes.items()}
        for path, tops in zip(found, _to_host(list(found.values())), strict=True):
            first = self._part(path)[0] * len(tops)
            whole[path][first : first + len(tops)] = tops
        if self._monitor._processes.number > 1 and whole:
            device = next(self._monitor._model.parameters()).device
            joined = torch.cat(list(whole.values())).to(device)
            distributed.all_reduce(joined, distributed.ReduceOp.MAX, group=self._monitor._processes.group)
            sizes = [shape.heads for shape in self._shapes.values()]
            whole = dict(zip(whole, torch.split(joined.cpu(), sizes), strict=True))
        return {path: tops.to(torch.float64) for path, tops in whole.items()}

    def _learn_shapes(self) -> None:
        """Read the heads of layers from their first calls, in any process; the same result in all processes."""
        if self._shapes.keys() >= self._layouts.keys() and self._shapes:
            self._find_called_layouts()
            return
        here: dict[str, HeadShape] = {}
        for path in self._trackers:
            shape = self._layers[path].head_shape
            if shape is not None:
                here[path] = HeadShape(shape[0] * self._part(path)[1], shape[1])
        messages = [(list(self._trackers), here)]
        processes = self._monitor._processes
        if processes.number > 1:
            messages *= processes.number
            distributed.all_gather_object(messages, messages[0], group=processes.group)
        if any(paths != messages[0][0] for paths, _ in messages):
            raise ArgumentError(
                "process_group is not accepted: the processes have different attention layers; expected the group of "
                "processes that hold the same layers"
            )
        for path in self._trackers:
            shapes = [known[path] for _, known in messages if path in known]
            if shapes:
                self._shapes[path] = shapes[0]
        self._find_called_layouts()

    def _part(self, path: str) -> tuple[int, int]:
        """The share of this process in the heads of a layer: its index, and the number of shares."""
        return self._monitor.head_parts.get(path, (0, 1))


def _read_masters(masters: Mapping[Tensor, Tensor] | None) -> dict[Tensor, Tensor]:
    if masters is None:
        return {}
    if not isinstance(masters, Mapping) or not all(isinstance(x, Tensor) for pair in masters.items() for x in pair):
        reject_type("masters", masters, "a mapping of parameters to tensors")
    for parameter, master in masters.items():
        if parameter.shape != master.shape or is_dtensor(parameter) != is_dtensor(master):
            reject("masters", tuple(master.shape), f"a tensor in the shape of its parameter, {tuple(parameter.shape)}")
    return dict(masters)


def _to_host(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Tensors [H] of several layers on the CPU, with one synchronisation."""
    if not tensors:
        return ()
    together = torch.cat([x.to(tensors[0].device) for x in tensors]).cpu()
    return tuple(torch.split(together, [len(x) for x in tensors]))


def _multiply_outputs(x: Tensor, factors: Tensor, axis: int) -> None:
    """Multiply x in place by a factor for every index of an axis. What has the factor 1 is not touched."""
    local: Any = x
    if is_dtensor(x):
        factors, local = _local_factors(x, factors, axis), x.to_local()  # type: ignore[attr-defined]
    rows = (factors != 1).nonzero()[:, 0]
    if not rows.numel() or not local.numel():
        return
    shape = [1] * local.dim()
    shape[axis] = -1
    wide = torch.promote_types(local.dtype, torch.float32)
    of_rows = factors[rows].to(local.device, wide).view(shape)
    rows = rows.to(local.device)
    # Rounded once.
    local.index_copy_(axis, rows, (local.index_select(axis, rows).to(wide) * of_rows).to(local.dtype))


def _local_factors(x: Any, factors: Tensor, axis: int) -> Tensor:
    """The factors of the local part of a DTensor, which is a contiguous block."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # imported with DTensors

    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return factors[offset[axis] : offset[axis] + shape[axis]]
