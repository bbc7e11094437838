"""Selection of the attention layers that get a policy, and the errors and warnings for unsupported cases."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn

from torch import nn

from attnscale._util.checks import read_int
from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError, ArgumentTypeError, reject, reject_type
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, reject_model, transformers_model
from attnscale.hf.context import is_unstretched, trained_length
from attnscale.hf.existing import Existing, find_existing
from attnscale.hf.plan import beta_at_end
from attnscale.hf.sites import MonitoredSite, site_of
from attnscale.policies import LengthPolicy, Policy
from attnscale.policies.learned import SSMax
from attnscale.policies.per_head import PerHead
from attnscale.policies.published import DeepSeek, LongRope, Yarn

Layers = Literal["all", "full", "nope"] | str | int | Sequence[int]
Towers = Literal["text", "all"]
OnExisting = Literal["raise", "compose", "replace"]

OWN_ATTENTION = "computes attention without transformers' AttentionInterface"
INDEXED_KEYS = "selects its own keys (with an indexer or compressor)"

# Warn from this β on: published models reach 1.9, absolute laws 2.5 to 80 at common lengths.
SHARP = 2.0
# Warn below this β; the rounding error of f(n)/f(L) is far smaller.
SOFT = 0.99

# For models without `max_position_embeddings` in their config.
_USUAL_LENGTH = 2048

_FACTORS = (Yarn, DeepSeek, LongRope)
_STRETCH = "attnscale.hf.recommend(model, length) shows how to stretch it"

_NORM = re.compile(r"norm|\bln_|layer_?norm", re.IGNORECASE)


def select(
    model: nn.Module, *, layers: Layers = "all", cross: bool = False, towers: Towers = "text"
) -> list[AttentionLayer]:
    """Return the attention layers selected by the keywords of `apply`."""
    if towers not in ("text", "all"):
        reject("towers", towers, "'text' or 'all'")
    found = find_attention_layers(model)
    if not found:
        reject_model_without_attention(model)
    every = [layer for layer in found if (cross or not layer.cross) and (towers == "all" or layer.text)]
    named = str(layers)  # a numpy array would be compared element by element
    if named == "all":
        chosen = every
    elif named == "full":
        chosen = [layer for layer in every if layer.window is None]
    elif named == "nope":
        chosen = [layer for layer in every if layer.rope is False]
    else:
        if isinstance(layers, str):
            numbers = read_range("layers", layers)
        else:
            accepted = "'all', 'full', 'nope', an int, a sequence of ints, or a range such as '4-11'"
            given = list(layers) if isinstance(layers, Iterable) else [layers]
            if not given:
                reject_type("layers", layers, accepted)
            numbers = [read_int("layers", number, accepted) for number in given]
        present = {layer.layer for layer in every}
        if present and any(number not in present for number in numbers):
            reject("layers", layers, f"'all', 'full', 'nope' or layers of this model, {write_range(sorted(present))}")
        chosen = [layer for layer in every if layer.layer in numbers]
    if not chosen:
        raise ArgumentError(
            f"layers={layers!r}, cross={cross}, towers={towers!r} are not accepted: together they select no attention "
            f"layer of {type(transformers_model(model)).__name__}; attnscale.hf.inspect(model) lists its layers"
        )
    return chosen


def refuse_model_as_policy(model: object, policy: object) -> None:
    """Raise if a model was passed as the policy. The message has only its class name, not its long repr."""
    if isinstance(policy, nn.Module) and not isinstance(policy, Policy):
        hint = "" if isinstance(model, nn.Module) else "; the model is the first argument, the policy the second"
        raise ArgumentTypeError(
            f"policy={type(policy).__name__} is not accepted: expected a name, a mapping, a YAML file or a policy{hint}"
        )


def check_on_existing(on_existing: str) -> None:
    """Raise for an invalid value of `on_existing`."""
    if on_existing not in ("raise", "compose", "replace"):
        reject("on_existing", on_existing, "'raise', 'compose' or 'replace'")


def why_unsupported(layer: AttentionLayer, every: Sequence[AttentionLayer]) -> str | None:
    """Return the reason why a layer cannot have a policy, with advice, or None.

    Excluding the layer is suggested only if supported layers remain.
    """
    if not layer.routed:
        advice = "exclude it with layers=..., or call"
        if not any(other.routed for other in every):
            advice = "this holds for every layer of the model; call"
        return f"{OWN_ATTENTION}; {advice} attnscale.scaled_dot_product_attention in its forward method"
    if layer.sparse:
        advice = "exclude these layers with layers=..."
        if all(other.sparse for other in every):
            advice = "this holds for every layer of the model"
        return f"{INDEXED_KEYS}; attnscale does not support this; {advice}"
    return None


def refuse_unsupported(model: nn.Module, chosen: Sequence[AttentionLayer]) -> None:
    """Raise for layers that bypass `AttentionInterface` or select their own keys."""
    every = find_attention_layers(model)
    reasons = {layer: why_unsupported(layer, every) for layer in sorted(chosen, key=lambda layer: layer.routed)}
    for reason in filter(None, reasons.values()):
        reject_model(model, reason, [layer for layer in chosen if reasons[layer] == reason])


def refuse_applied(model: nn.Module, chosen: Sequence[AttentionLayer]) -> None:
    """Raise for a model that already has policies, or a stock model with an attached monitor."""
    applied = [layer for layer in find_attention_layers(model) if site_of(layer.module) is not None]
    if any(isinstance(site_of(layer.module), MonitoredSite) for layer in applied):
        reject_model(model, "a Monitor is attached; close it, apply the policy, and attach a new Monitor")
    again = [layer for layer in chosen if site_of(layer.module) is not None]
    if again:
        reject_model(model, "already has a policy; call handle.remove() first", again)
    if applied:
        first, second = (write_range(sorted({layer.layer for layer in group})) for group in (applied, chosen))
        plan = f"apply(model, {{'layers': {{{first!r}: ..., {second!r}: ...}}}})"
        advice = f"call handle.remove() and pass both in one plan: {plan}"
        reject_model(model, f"has a policy from an earlier apply; {advice}", applied)


def refuse_existing(model: nn.Module, chosen: Sequence[AttentionLayer], on_existing: str) -> None:
    """Raise for layers with built-in length scaling if `on_existing` is "raise"."""
    check_on_existing(on_existing)
    scaled = [layer for layer in chosen if find_existing(model, layer)] if on_existing == "raise" else []
    if scaled:
        description = find_existing(model, scaled[0])[0].description
        advice = "pass on_existing='compose' to multiply by β on top, or 'replace' to disable it"
        reject_model(model, f"already scales its logits ({description}); {advice}", scaled)


def replaceable(model: nn.Module, layer: AttentionLayer) -> list[Existing]:
    """Return the built-in length scaling of a layer; raise if it cannot be disabled."""
    found = find_existing(model, layer)
    for existing in found:
        if existing.fixed is not None:
            reject_model(model, f"already scales its logits ({existing.description}); {existing.fixed}", [layer])
    return found


def reject_model_without_attention(model: nn.Module) -> NoReturn:
    """Raise for a model without any attention layer."""
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        reject_model(model, "its attention is torch.nn.MultiheadAttention; use attnscale.convert")
    reject_model(model, "it has no softmax attention (state-space, recurrent and convolutional models have none)")


def find_cautions(model: nn.Module, layers: Sequence[AttentionLayer], policies: Mapping[str, Policy]) -> list[str]:
    """Return the warnings for policies that are likely to harm a trained model, or have no effect on it."""
    origin = _origin(model)
    if origin is None:
        return []
    length = trained_length(transformers_model(model).config)
    parts = [(layer, part) for layer in layers if layer.path in policies for part in _parts(policies[layer.path])]
    laws = [(layer, law) for layer, law in parts if _is_length_law(law)]
    found = [_warn_of_sharp(laws, length or _USUAL_LENGTH, origin), _warn_of_soft(laws, length or _USUAL_LENGTH)]
    if length is not None:
        found += [_warn_of_reference(parts, length), _warn_of_factor(parts, length), _warn_of_rope(laws, length)]
    return [text for text in found if text is not None]


_Part = tuple[AttentionLayer, LengthPolicy]


def _warn_of_sharp(laws: Sequence[_Part], length: int, origin: str) -> str | None:
    """Warn of absolute laws, whose β is much larger than 1."""
    absolute = [(layer, law) for layer, law in laws if getattr(law, "reference_length", None) is None]
    sharp = [(beta, layer) for layer, law in absolute if (beta := _beta(law, layer, length)) >= SHARP]
    if not sharp:
        return None
    beta, layer = max(sharp, key=lambda found: found[0])
    return (
        f"attnscale: in {_number(sharp)} layer(s) the policy multiplies the logits by up to {beta:.3g} "
        f"(at n = {min(length, layer.window or length)}), but {origin}. To keep β = 1 "
        f"up to the trained length, pass reference_length={length}, floor=True"
    )


def _warn_of_soft(laws: Sequence[_Part], length: int) -> str | None:
    """Warn of anchored laws in sliding-window layers that never see enough keys for β = 1."""
    fixed = [(layer, law) for layer, law in laws if not any(p.requires_grad for p in law.parameters())]
    bounded = [(layer, law, max(length, layer.window)) for layer, law in fixed if layer.window]
    soft = [(beta, layer) for layer, law, end in bounded if (beta := _beta(law, layer, end)) < SOFT]
    if not soft:
        return None
    beta, layer = min(soft, key=lambda found: found[0])
    return (
        f"attnscale: in {_number(soft)} sliding-window layer(s) β is at most {beta:.3g} at every text length "
        f"(n <= {layer.window}), but the model was pretrained with β = 1. Pass floor=True to keep β >= 1, or "
        "layers='full' to exclude these layers"
    )


def _warn_of_reference(parts: Sequence[_Part], length: int) -> str | None:
    """Warn of scalable softmax that starts at β = 1 at its default length instead of the trained length."""
    default = SSMax.reference_length
    strange = [
        (float(math.log(length) / math.log(default)), layer)
        for layer, part in parts
        if isinstance(part, SSMax) and part.reference_length == default != length and _is_initial(part)
    ]
    if not strange:
        return None
    return (
        f"attnscale: in {_number(strange)} layer(s) the scale of ssmax starts with β = 1 at n = {default}, its default "
        f"reference_length, and with β = {strange[0][0]:.3g} at the trained length {length}. Pass "
        f"reference_length={length}"
    )


def _warn_of_factor(parts: Sequence[_Part], length: int) -> str | None:
    """Warn of the factor of a stretched rotary embedding on one that is not stretched."""
    factors = [(part.uniform or 1.0, layer) for layer, part in parts if isinstance(part, _FACTORS)]
    strange = [(beta, layer) for beta, layer in factors if beta != 1.0 and is_unstretched(layer, 0)]
    if not strange:
        return None
    return (
        f"attnscale: in {_number(strange)} layer(s) β = {strange[0][0]:.4g} at every length, also up to the trained "
        f"length {length}: this factor belongs to a stretched rotary embedding, and that of the model is not "
        f"stretched. {_STRETCH}"
    )


def _warn_of_rope(laws: Sequence[_Part], length: int) -> str | None:
    """Warn of laws that act only where a rotary embedding has not been trained and is not stretched."""
    idle = [
        (0.0, layer)
        for layer, law in laws
        if getattr(law, "floor", False) and getattr(law, "reference_length", 0) >= length
        if is_unstretched(layer, length)
    ]
    if not idle:
        return None
    return (
        f"attnscale: in {_number(idle)} layer(s) the policy acts only beyond the trained length {length}, where the "
        f"rotary embedding of the model fails first: it is not stretched. {_STRETCH}"
    )


def _number(found: Sequence[tuple[float, AttentionLayer]]) -> int:
    return len({layer.path for _, layer in found})  # a layer may occur once per head


def _origin(model: nn.Module) -> str | None:
    """Describe how the weights of a model were trained; None if they are fresh, or belong to a policy in the config.

    `name_or_path` is not sufficient: a randomly initialised model with a loaded config has it too. transformers marks
    parameters read from a file. A model built in memory that got its weights in another way is recognised by its
    normalisation: before training, each of these parameters has the same value in all channels.
    """
    inner = transformers_model(model)
    if getattr(inner.config, "attnscale", None) is not None:
        return None
    if inner.config.name_or_path and any(getattr(p, "_is_hf_initialized", False) for p in inner.parameters()):
        return "the model was pretrained with β = 1"
    scales = [parameter for name, parameter in inner.named_parameters() if _NORM.search(name) and parameter.dim() == 1]
    if any(not p.is_meta and p.numel() > 1 and bool((p != p[0]).any()) for p in scales):
        return "its weights are already trained, with β = 1 unless this policy was part of the training"
    return None


def _parts(policy: Policy) -> list[LengthPolicy]:
    """Return the policy itself, or those of its heads."""
    modules = [policy] if not isinstance(policy, nn.Module) else list(policy.modules())
    return [one for one in modules if isinstance(one, LengthPolicy) and not isinstance(one, PerHead)]


def _is_length_law(part: LengthPolicy) -> bool:
    """Whether β depends on the length alone. Constants are an explicit choice; scores and queries are not read here."""
    return part.uniform is None and not part.needs_query and not hasattr(part, "needs_scores")


def _is_initial(policy: SSMax) -> bool:
    """Whether the scale of a policy still has its initial value."""
    start = 1 / math.log(policy.reference_length)
    return policy.init is None and (policy.s.is_meta or bool((policy.s - start).abs().max() < 1e-6))


def _beta(policy: LengthPolicy, layer: AttentionLayer, length: int) -> float:
    """Return the largest β over heads in the last row of a text of this length."""
    return float(beta_at_end(policy, layer, [length]).max())
