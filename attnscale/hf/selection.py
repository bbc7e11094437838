"""Selection of the attention layers that get a policy, and the errors and warnings for unsupported cases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn

from torch import nn
from transformers import PreTrainedConfig

from attnscale._util.checks import read_int
from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError, ArgumentTypeError, reject, reject_type
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, reject_model, transformers_model
from attnscale.hf.existing import Existing, find_existing
from attnscale.hf.plan import beta_at_end
from attnscale.hf.sites import MonitoredSite, site_of
from attnscale.policies import LengthPolicy, Policy
from attnscale.policies.per_head import PerHead

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

# Rotary embeddings of models that were trained at the stretched length, `max_position_embeddings`: Llama 3.1, Phi-3.
_TRAINED_STRETCHED = ("llama3", "longrope")


def trained_length(config: PreTrainedConfig) -> int | None:
    """Return the length at which a model was trained, or None if the config does not name one.

    With a stretched rotary embedding, `max_position_embeddings` is the stretched length and
    `original_max_position_embeddings` the trained one.

    Example:
        >>> from transformers import LlamaConfig
        >>> rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
        >>> trained_length(LlamaConfig(max_position_embeddings=131072, rope_parameters=rope))
        32768
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    rope = rope.get("full_attention") or rope  # some models have one entry per layer type
    known = [getattr(text, "max_position_embeddings", None)]
    if rope.get("rope_type") not in _TRAINED_STRETCHED:
        known.append(rope.get("original_max_position_embeddings"))
    return min((length for length in known if isinstance(length, int) and length > 1), default=None)


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
    """Return the warnings for a pretrained model: β much larger than 1, or sliding-window layers with β always < 1."""
    if not _is_pretrained(model):
        return []
    length = trained_length(transformers_model(model).config) or _USUAL_LENGTH
    laws = [(layer, law) for layer in layers if layer.path in policies for law in _laws(policies[layer.path])]
    texts = []
    absolute = [(layer, law) for layer, law in laws if getattr(law, "reference_length", None) is None]
    sharp = [(beta, layer) for layer, law in absolute if (beta := _beta(law, layer, length)) >= SHARP]
    if sharp:
        beta, layer = max(sharp, key=lambda found: found[0])
        number = len({layer.path for _, layer in sharp})  # a layer may occur once per head
        texts.append(
            f"attnscale: in {number} layer(s) the policy multiplies the logits by up to {beta:.3g} "
            f"(at n = {min(length, layer.window or length)}), but the model was pretrained with β = 1. To keep β = 1 "
            f"up to the trained length, pass reference_length={length}, floor=True"
        )
    fixed = [(layer, law) for layer, law in laws if not any(p.requires_grad for p in law.parameters())]
    bounded = [(layer, law, max(length, layer.window)) for layer, law in fixed if layer.window]
    soft = [(beta, layer) for layer, law, end in bounded if (beta := _beta(law, layer, end)) < SOFT]
    if soft:
        beta, layer = min(soft, key=lambda found: found[0])
        number = len({layer.path for _, layer in soft})
        texts.append(
            f"attnscale: in {number} sliding-window layer(s) β is at most {beta:.3g} at every text length "
            f"(n <= {layer.window}), but the model was pretrained with β = 1. Pass floor=True to keep β >= 1, or "
            "layers='full' to exclude these layers"
        )
    return texts


def _is_pretrained(model: nn.Module) -> bool:
    """Whether the weights come from `from_pretrained` and the config has no attnscale policy.

    `name_or_path` is not sufficient: a randomly initialised model with a loaded config has it too. transformers marks
    parameters read from a file.
    """
    inner = transformers_model(model)
    if not inner.config.name_or_path or getattr(inner.config, "attnscale", None) is not None:
        return False
    return any(getattr(parameter, "_is_hf_initialized", False) for parameter in inner.parameters())


def _laws(policy: Policy) -> list[LengthPolicy]:
    """Return the length-dependent laws in a policy: the policy itself, or those of its heads.

    Constants are excluded, as an explicit choice, and so are policies that depend on scores or queries.
    """
    modules = [policy] if not isinstance(policy, nn.Module) else list(policy.modules())
    found = [one for one in modules if isinstance(one, LengthPolicy) and not isinstance(one, PerHead)]
    return [one for one in found if one.uniform is None and not one.needs_query and not hasattr(one, "needs_scores")]


def _beta(policy: LengthPolicy, layer: AttentionLayer, length: int) -> float:
    """Return the largest β over heads in the last row of a text of this length."""
    return float(beta_at_end(policy, layer, [length]).max())
