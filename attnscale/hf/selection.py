"""Which attention layers of a model get a policy, and which models or layers are refused with what advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn

from torch import nn

from attnscale._util.checks import read_int
from attnscale._util.ranges import read_range, write_range
from attnscale.errors import ArgumentError, ArgumentTypeError, reject, reject_type
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, reject_model, transformers_model
from attnscale.hf.existing import find_existing
from attnscale.hf.plan import beta_at_end
from attnscale.hf.sites import MonitoredSite, site_of
from attnscale.policies import LengthPolicy, Policy
from attnscale.policies.per_head import PerHead

Layers = Literal["all", "full", "nope"] | str | int | Sequence[int]
Towers = Literal["text", "all"]
OnExisting = Literal["raise", "compose", "replace"]

OWN_ATTENTION = "computes attention itself"
INDEXED_KEYS = "attends to keys that an indexer picks"

# β from which logits count as multiplied: published systems reach 1.9, absolute laws have 2.5 to 80 at usual lengths.
SHARP = 2.0
# β below which a layer counts as softened; the rounding of f(n)/f(L) is far smaller.
SOFT = 0.99

# For models whose config does not say how long their texts were.
_USUAL_LENGTH = 2048


def select(
    model: nn.Module, *, layers: Layers = "all", cross: bool = False, towers: Towers = "text"
) -> list[AttentionLayer]:
    """The attention layers that the keywords of `apply` select."""
    if towers not in ("text", "all"):
        reject("towers", towers, "'text' or 'all'")
    found = find_attention_layers(model)
    if not found:
        reject_model_without_attention(model)
    every = [layer for layer in found if (cross or not layer.cross) and (towers == "all" or layer.text)]
    named = str(layers)  # an array of numpy compares its elements with a string
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
            accepted = "'all', 'full', 'nope', a number, several, or a range such as '4-11'"
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
            f"of {type(transformers_model(model)).__name__}; attnscale.hf.inspect(model) shows what it has"
        )
    return chosen


def refuse_model_as_policy(model: object, policy: object) -> None:
    """Refuse a model in the place of the policy, naming only its class."""
    if isinstance(policy, nn.Module) and not isinstance(policy, Policy):
        hint = "" if isinstance(model, nn.Module) else "; the model comes first, then the policy"
        raise ArgumentTypeError(
            f"policy={type(policy).__name__} is not accepted: expected a name, a mapping, a YAML file or a policy{hint}"
        )


def check_on_existing(on_existing: str) -> None:
    """Refuse what is no value of `on_existing`."""
    if on_existing not in ("raise", "compose", "replace"):
        reject("on_existing", on_existing, "'raise', 'compose' or 'replace'")


def why_unsupported(layer: AttentionLayer, every: Sequence[AttentionLayer]) -> str | None:
    """Why a layer cannot have a policy, and what to do; leaving it out helps only if others of the model remain."""
    if not layer.routed:
        advice = "it does not ask transformers' interface: leave it out with layers=..., or"
        if not any(other.routed for other in every):
            advice = (
                "no layer of this model asks transformers' interface, so there is nothing for layers=... to select:"
            )
        return f"{OWN_ATTENTION}; {advice} call attnscale.scaled_dot_product_attention in its forward"
    if layer.sparse:
        advice = "leave these layers out with layers=..."
        if all(other.sparse for other in every):
            advice = "every layer of this model does, so a policy cannot be given to it"
        return f"{INDEXED_KEYS}, and would silently attend to all of them; {advice}"
    return None


def refuse_unsupported(model: nn.Module, chosen: Sequence[AttentionLayer]) -> None:
    """Refuse layers that do not call the interface, or whose keys an indexer picks."""
    every = find_attention_layers(model)
    reasons = {layer: why_unsupported(layer, every) for layer in sorted(chosen, key=lambda layer: layer.routed)}
    for reason in filter(None, reasons.values()):
        reject_model(model, reason, [layer for layer in chosen if reasons[layer] == reason])


def refuse_applied(model: nn.Module, chosen: Sequence[AttentionLayer]) -> None:
    """Refuse a model that has policies already, or that a monitor has changed in order to listen."""
    applied = [layer for layer in find_attention_layers(model) if site_of(layer.module) is not None]
    if any(isinstance(site_of(layer.module), MonitoredSite) for layer in applied):
        reject_model(model, "a Monitor listens to it; close it, apply the policy, and attach a new one")
    again = [layer for layer in chosen if site_of(layer.module) is not None]
    if again:
        reject_model(model, "has a policy already; handle.remove() first", again)
    if applied:
        first, second = (write_range(sorted({layer.layer for layer in group})) for group in (applied, chosen))
        plan = f"apply(model, {{'layers': {{{first!r}: ..., {second!r}: ...}}}})"
        advice = f"handle.remove() first, and give both in one plan: {plan}"
        reject_model(model, f"has a policy from another apply; {advice}", applied)


def refuse_existing(model: nn.Module, chosen: Sequence[AttentionLayer], on_existing: str) -> None:
    """Refuse layers that the model scales by length already, unless `on_existing` says what to do about it."""
    check_on_existing(on_existing)
    scaled = [layer for layer in chosen if find_existing(model, layer)] if on_existing == "raise" else []
    if scaled:
        description = find_existing(model, scaled[0])[0].description
        advice = "pass on_existing='compose' to scale on top of it, or 'replace' to switch it off"
        reject_model(model, f"already scales its logits ({description}); {advice}", scaled)


def reject_model_without_attention(model: nn.Module) -> NoReturn:
    """Refuse a model in which no attention was found."""
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        reject_model(model, "its attention is torch.nn.MultiheadAttention, for attnscale.convert")
    others = "(state-space, recurrent and convolutional models have none)"
    reject_model(model, f"it has no softmax attention, and so no logits to scale {others}")


def find_cautions(model: nn.Module, layers: Sequence[AttentionLayer], policies: Mapping[str, Policy]) -> list[str]:
    """One text where policies multiply the logits of a pretrained model, one where its sliding layers stay softened."""
    if not _is_pretrained(model):
        return []
    length = getattr(transformers_model(model).config.get_text_config(), "max_position_embeddings", None)
    length = length if isinstance(length, int) and length > 1 else _USUAL_LENGTH
    laws = [(layer, law) for layer in layers if layer.path in policies for law in _laws(policies[layer.path])]
    texts = []
    absolute = [(layer, law) for layer, law in laws if getattr(law, "reference_length", None) is None]
    sharp = [(beta, layer) for layer, law in absolute if (beta := _beta(law, layer, length)) >= SHARP]
    if sharp:
        beta, layer = max(sharp, key=lambda found: found[0])
        number = len({layer.path for _, layer in sharp})  # each may be there once per head
        texts.append(
            f"attnscale: the logits of {number} layers of a pretrained model are multiplied by up to "
            f"{beta:.3g} (β at n = {min(length, layer.window or length)}); it was trained with 1. Anchor the law: "
            f"reference_length={length}, floor=True"
        )
    fixed = [(layer, law) for layer, law in laws if not any(p.requires_grad for p in law.parameters())]
    bounded = [(layer, law, max(length, layer.window)) for layer, law in fixed if layer.window]
    soft = [(beta, layer) for layer, law, end in bounded if (beta := _beta(law, layer, end)) < SOFT]
    if soft:
        beta, layer = min(soft, key=lambda found: found[0])
        number = len({layer.path for _, layer in soft})
        texts.append(
            f"attnscale: {number} layers of a pretrained model see at most {layer.window} keys, where β stays "
            f"at {beta:.3g} or below however long the text: they are softened for good. floor=True keeps them at 1, "
            "layers='full' leaves them out"
        )
    return texts


def _is_pretrained(model: nn.Module) -> bool:
    """Whether the weights were loaded by `from_pretrained`, and not trained with attnscale, which the config says.

    A random model with a loaded config has a `name_or_path` too; but transformers marks parameters read from a file.
    """
    inner = transformers_model(model)
    if not inner.config.name_or_path or getattr(inner.config, "attnscale", None) is not None:
        return False
    return any(getattr(parameter, "_is_hf_initialized", False) for parameter in inner.parameters())


def _laws(policy: Policy) -> list[LengthPolicy]:
    """The laws of length or position in a policy: itself, or those of its heads.

    Not constants, which somebody chose, nor policies that depend on scores or queries.
    """
    modules = [policy] if not isinstance(policy, nn.Module) else list(policy.modules())
    found = [one for one in modules if isinstance(one, LengthPolicy) and not isinstance(one, PerHead)]
    return [one for one in found if one.uniform is None and not one.needs_query and not hasattr(one, "needs_scores")]


def _beta(policy: LengthPolicy, layer: AttentionLayer, length: int) -> float:
    """The largest β of a head at the end of a text of that length."""
    return float(beta_at_end(policy, layer, [length]).max())
