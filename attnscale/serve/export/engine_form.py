"""The temperature formula of stock engines, c·(1 + b·ln(1 + ⌊pos / L⌋)): fitted to the policies of a model, or refused.

Ministral 3 in transformers, vLLM and SGLang, and the architecture `mistral3` of llama.cpp multiply q by
1 + b·ln(1 + ⌊pos / L⌋), with one b and one L for all layers. A factor c of each head can be multiplied into its rows of
q_proj. `mistral` and constants have this form. With L = 1 and a large b it is c·b·ln n: the 1 is below the rounding of
fp32. `log` without floor and `ssmax` without bias have that form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnscale.errors import ArgumentError, ExportError
from attnscale.policies import Policy
from attnscale.serve.tables import check_has_table

# b of the form ln n, in units of its slope, so that 1 + b·ln n is b·ln n in fp32. A power of two, so that weights
# multiplied by its inverse keep their bits.
_LARGE = 2.0**28

# Positions at which forms and policies are compared: all below _DENSE or the context, and a grid up to _LONGEST.
_DENSE, _LONGEST = 2**13, 2**20

# Largest error of an exact form, relative to the largest β of a head; β itself is rounded to fp32.
TOLERANCE = 1e-6


class ServedLayer(NamedTuple):
    """An attention layer, its policy (None: β = 1), the number of its heads and its sliding window."""

    path: str
    policy: Policy | None
    num_heads: int
    window: int | None


class EngineForm(NamedTuple):
    """β = c·(1 + b·ln(1 + ⌊pos / L⌋)).

    Attributes:
        coefficient: b.
        length: L.
        factors: path of each layer → c [H], in fp64.
        error: largest difference from the β of the policies, at any position.
    """

    coefficient: float
    length: int
    factors: Mapping[str, Tensor]
    error: float

    def check_read(self, coefficient: float, length: int) -> None:
        """Raise if b and L read from an exported file differ from this form by more than the rounding of fp32."""
        if length != self.length or not math.isclose(coefficient, self.coefficient, rel_tol=TOLERANCE):
            raise ExportError(
                f"the exported file has the temperature ({coefficient!r}, {length!r}), not "
                f"({self.coefficient!r}, {self.length!r})"
            )


class _Miss(NamedTuple):
    """The largest difference between a form and the policies: absolute, relative to the head's β, and where."""

    absolute: float
    relative: float
    layer: ServedLayer
    position: int


def fit_engine_form(layers: Iterable[ServedLayer], longest: int, engine: str) -> EngineForm:
    """Return the form that equals the policies of a model at every position.

    Position 0 is ignored: with a single visible key, every β gives the same softmax.

    Args:
        layers: the attention layers of a model with causal attention and without attention sinks.
        longest: the context length of the model; positions beyond it are compared too, as far as 2²⁰.
        engine: the format, for error messages.

    Raises:
        ArgumentError: a policy reads scores or queries, or no form is exact; the message gives the size of the error.

    Example:
        >>> from attnscale import build_policy
        >>> layer = ServedLayer("layers.0", build_policy("mistral", floor_length=64), num_heads=2, window=None)
        >>> form = fit_engine_form([layer], 1024, "mistral")
        >>> form.length, round(form.coefficient, 6), form.factors["layers.0"].tolist()
        (64, 0.1, [1.0, 1.0])
        >>> floored = build_policy("log", reference_length=64, floor=True)
        >>> fit_engine_form([layer._replace(policy=floored)], 1024, "mistral")
        Traceback (most recent call last):
        ...
        attnscale.errors.ArgumentError: policy Log(...floor=True) of layers.0 is not accepted by --to mistral: ...
    """
    served = list(layers)
    for layer in served:
        if layer.policy is not None:
            check_has_table(layer.policy, layer.path)
    positions = _positions(served, longest)
    best: tuple[_Miss, EngineForm] | None = None
    for coefficient, length in _candidates(served, positions):
        form, miss = _fit_factors(served, positions, coefficient, length)
        if best is None or miss.relative < best[0].relative:
            best = miss, form
        if miss.relative <= TOLERANCE:
            return form
    if best is None:
        raise ArgumentError("the model has no attention layer")
    miss, form = best
    shown = " ".join(repr(miss.layer.policy).split())
    raise ArgumentError(
        f"policy {shown} of {miss.layer.path} is not accepted by --to {engine}: the closest form of the "
        f"engine, c·(1 + {form.coefficient:.4g}·ln(1 + ⌊pos / {form.length}⌋)) with one c for each head, misses its β "
        f"by up to {miss.absolute:.2g} ({miss.relative:.2%} of the largest β), at position {miss.position}; --to vllm "
        "is exact for every policy of length and position"
    )


def _candidates(layers: list[ServedLayer], positions: Tensor) -> Iterator[tuple[float, int]]:
    """Yield (b, L): constant, the steps of the policies, ln n, and an offset plus ln n."""
    yield 0.0, int(positions[-1]) + 1
    parts = [part for layer in layers for part in _parts(layer.policy)]
    steps = {(getattr(part, "coefficient", None), getattr(part, "floor_length", None)) for part in parts}
    named = sorted((float(own), step) for own, step in steps if isinstance(own, (int, float)) and isinstance(step, int))
    yield from named
    for length in dict.fromkeys([1, *(step for _, step in named)]):
        offset, slope = _steepest_head(layers, positions, length)
        if slope == 0.0:
            continue
        if length == 1:
            yield abs(slope) * _LARGE, length
        if offset != 0.0:
            yield slope / offset, length


def _parts(policy: Policy | None) -> Iterator[object]:
    """Yield a policy and the policies inside it (`per_head`)."""
    yield from policy.modules() if isinstance(policy, torch.nn.Module) else (policy,)


def _steepest_head(layers: list[ServedLayer], positions: Tensor, length: int) -> tuple[float, float]:
    """Return offset and slope of β over ln(1 + ⌊pos / L⌋), by least squares, for the head with the largest slope."""
    x = _logarithm(positions, length)
    centred = x - x.mean()
    if not bool(centred.any()):
        return 0.0, 0.0
    found = (0.0, 0.0)
    for layer in layers:
        beta = _beta(layer, positions)
        slope = (centred[:, None] * beta).sum(0) / centred.square().sum()
        head = int(slope.abs().argmax())
        if abs(float(slope[head])) > abs(found[1]) * (1 + TOLERANCE):  # ties: the first, whatever the rounding
            found = float(beta[:, head].mean() - slope[head] * x.mean()), float(slope[head])
    return found


def _fit_factors(
    layers: list[ServedLayer], positions: Tensor, coefficient: float, length: int
) -> tuple[EngineForm, _Miss]:
    """Return the form with the best c for each head, and its largest error relative to the β of the head."""
    scale = 1 + coefficient * _logarithm(positions, length)
    factors: dict[str, Tensor] = {}
    worst = _Miss(-1.0, -1.0, layers[0], 0)
    largest = 0.0
    for layer in layers:
        beta = _beta(layer, positions)
        factor = _snapped((scale[:, None] * beta).sum(0) / scale.square().sum())  # [H]
        error = (factor * scale[:, None] - beta).abs()
        highest = beta.abs().amax(0)
        relative = torch.where(highest > 0, error / highest, error)
        place = int(relative.argmax())
        row, head = divmod(place, relative.shape[1])
        miss = _Miss(float(error[row, head]), float(relative[row, head]), layer, int(positions[row]))
        worst = miss if miss.relative > worst.relative else worst
        largest = max(largest, float(error.max()))
        factors[layer.path] = factor.expand(layer.num_heads).clone()
    return EngineForm(coefficient, length, factors, largest), worst


def _snapped(factor: Tensor) -> Tensor:
    """Return factors, rounded to a power of two if that is within the rounding of β: weights then keep their bits."""
    power = torch.exp2(torch.log2(factor.abs().clamp(min=math.ldexp(1.0, -1000))).round()) * factor.sign()
    return torch.where((factor - power).abs() <= TOLERANCE / 4 * power.abs(), power, factor)


def _positions(layers: list[ServedLayer], longest: int) -> Tensor:
    """Return positions ≥ 1 in ascending order: all of the context, then a geometric grid and the ends of steps.

    The grid exceeds the context, because engines can be told to serve longer prompts.
    """
    context = torch.arange(1, max(longest, _DENSE), device="cpu")
    ends = [context, torch.logspace(0, math.log2(_LONGEST), _DENSE, base=2, device="cpu").long()]
    for length in {getattr(part, "floor_length", None) for layer in layers for part in _parts(layer.policy)}:
        if isinstance(length, int):
            boundaries = torch.arange(1, min(_LONGEST // length, _DENSE) + 1, device="cpu") * length
            ends += [boundaries - 1, boundaries, boundaries + 1]
    positions: Tensor = torch.cat(ends).unique()  # type: ignore[no-untyped-call]
    return positions[positions > 0]


def _logarithm(positions: Tensor, length: int) -> Tensor:
    """Return ln(1 + ⌊pos / L⌋) in fp64."""
    return torch.log1p((positions // length).double())


def _beta(layer: ServedLayer, positions: Tensor) -> Tensor:
    """Return β [positions, H|1] of a layer in fp64."""
    if layer.policy is None:
        return torch.ones(len(positions), 1, dtype=torch.float64, device="cpu")
    visible = positions + 1 if layer.window is None else (positions + 1).clamp(max=layer.window)
    with torch.no_grad():
        beta = layer.policy(visible, positions=positions)
    return beta.reshape(-1, len(positions)).T.double()
