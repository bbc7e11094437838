"""The rules of `recommend`: what a model needs to read a longer text, by its positions, windows and own scaling."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from attnscale._util.ranges import write_range
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, transformers_model
from attnscale.hf.context import (
    NO_POSITIONS,
    ORIGINAL,
    Rope,
    TrainedLength,
    added_positions,
    has_position_bias,
    is_unstretched,
    longest_context,
    position_table,
    positions_of,
    rope_of,
    rope_parameters,
)
from attnscale.hf.existing import Existing, find_existing
from attnscale.hf.selection import why_unsupported
from attnscale.policies import POLICIES
from attnscale.policies.base import UniformPolicy

Verdict = Literal["unneeded", "apply", "stretch", "compare", "keep", "applied", "impossible", "unsupported", "unknown"]

HEADLINES: Final[Mapping[Verdict, str]] = {
    "unneeded": "nothing to do",
    "apply": "apply a policy",
    "stretch": "stretch the rotary embedding first",
    "compare": "keep the model's own factor, or compare",
    "keep": "keep the model's own scaling",
    "applied": "already has a policy",
    "impossible": "cannot be extended this way",
    "unsupported": "attnscale.hf.apply does not support this model",
    "unknown": "the trained length is unknown",
}

# From this multiple of the trained length on, `log_squared` answered more questions than `log` in layers without
# positional encoding, at three times the cost (attnscale/lab/README.md). Below, both answered the same.
FAR: Final = 16

_TABLES = "https://github.com/attnscale/attnscale/blob/main/attnscale"


class Evidence(NamedTuple):
    """A measurement or publication behind a recommendation."""

    text: str
    link: str


TINY_MODELS = Evidence(
    "Five tiny models without positional encoding in the retrieving layer, trained at 128 tokens. At 16 times that "
    "length, β = 1 answers 79.9 % of the questions, log 93.1 % and log_squared 95.0 %; at 128 times 23.8 %, 73.7 % and "
    "77.7 %, for 0.035 (log) and 0.098 (log_squared) bits per byte. At 4 times, both laws answer the same.",
    f"{_TABLES}/lab/README.md#results-policies-swapped-into-trained-models",
)
SMOLLM2 = Evidence(
    "SmolLM2-135M, trained at 8192 tokens and stretched by YaRN: at 16384 tokens, log saves 0.0048 bits per byte. "
    "It finds 7.0 % of the needles, and β = 1 finds 6.6 %.",
    f"{_TABLES}/lab/calibration/README.md#a-real-model",
)
OWN_FACTOR = Evidence(
    "YaRN's paper tunes the factor (1 + 0.1·ln s)² on stretched models (https://arxiv.org/abs/2309.00071). In "
    "SmolLM2-135M at 16384 tokens it finds 9.8 % of the needles, and costs 0.0046 bits per byte in the first 4096 "
    "tokens.",
    f"{_TABLES}/lab/calibration/README.md#a-real-model",
)


@dataclass(frozen=True, eq=False)
class Case:
    """A model and the length it should read. `path` is None for a model without a known source."""

    model: nn.Module
    length: int
    trained: TrainedLength
    path: str | None
    in_memory: bool
    layers: Sequence[AttentionLayer]  # self-attention in text towers

    @cached_property
    def far(self) -> list[AttentionLayer]:
        """The layers that see more keys than in training."""
        return [layer for layer in self.layers if layer.window is None or layer.window > self.trained.tokens]

    @cached_property
    def existing(self) -> list[Existing]:
        """The built-in scaling of these layers, each kind once."""
        found = {one.description: one for layer in self.far for one in find_existing(self.model, layer)}
        return list(found.values())

    @property
    def times(self) -> float:
        return self.length / self.trained.tokens


@dataclass(frozen=True)
class Advice:
    """The result of the rules. `setup` is the code that loads the model, `command` an evaluation to run."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    policy: Mapping[str, Any] | None = None
    line: str | None = None
    setup: tuple[str, ...] = ()
    command: str | None = None
    evidence: tuple[Evidence, ...] = ()


class _Stretch(NamedTuple):
    """The changes of a config that stretch a rotary embedding: statements, or the reason why there are none."""

    statements: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    rope: str | None = None  # the option --rope of `attnscale evaluate` for the same embedding
    problem: str | None = None


def advise(case: Case) -> Advice:
    """Return what a model needs to read a text of the given length."""
    trained = case.trained.tokens
    if case.length <= trained:
        return Advice("unneeded", (f"The model was trained at {trained} tokens.",))
    if not case.far:
        widest = max(layer.window or 0 for layer in case.layers)
        return Advice(
            "unneeded",
            (
                f"Every layer has a sliding window, of at most {widest} keys, so n never exceeds the trained length: a "
                "policy with a floor would change nothing. Information reaches further only from layer to layer.",
            ),
        )
    table = position_table(case.model)
    if table is not None and case.length > table:
        return Advice(
            "impossible",
            (f"Positions are read from a table with {table} entries; later tokens have no position.",),
            ("A table with more entries, trained on longer texts. No temperature replaces it.",),
        )
    refused = {layer.path: why_unsupported(layer, case.layers) for layer in case.far}
    usable = [layer for layer in case.far if refused[layer.path] is None]
    if not usable:
        return Advice("unsupported", (f"{case.far[0].path} {refused[case.far[0].path]}.",))
    stretch = _stretch(case, usable)
    problem = stretch.problem or _why_unbuildable(case, stretch)
    if problem is not None:
        return Advice("impossible", (problem,), ("A rotary embedding that is stretched to this length.",))
    formulas = [one for one in case.existing if not _is_factor(one)]
    if formulas:
        return _keep(case, formulas, stretch)
    law, evidence = _law(case, usable)
    replaces = bool(case.existing) or bool(stretch.rope)
    fixed = next((one.fixed for one in case.existing if one.fixed is not None), None)
    if fixed is not None:
        return Advice("keep", (f"The model scales its logits ({case.existing[0].description}); {fixed}.",))
    keywords = _keywords(case, usable) | ({"on_existing": "replace"} if replaces else {})
    cautions = (*stretch.warnings, *_cautions(case))
    verdict: Verdict = "stretch" if stretch.statements else "compare" if case.existing else "apply"
    reasons = [*stretch.reasons]
    if verdict == "compare":
        reasons.append(
            f"The model already multiplies its logits by a constant factor ({case.existing[0].description}): a "
            "temperature for its stretched embedding. Keep it unless a comparison favours the line below."
        )
    reasons.append(_explained(case, law, replaces))
    own = [OWN_FACTOR] if replaces else []
    return Advice(
        verdict,
        tuple(reasons),
        ("A longer rotary embedding; a temperature alone does not replace it.",) if stretch.statements else (),
        cautions,
        law,
        _line(law, keywords),
        _setup(case, stretch),
        _command(case, stretch, law),
        (*evidence, *own),
    )


def _stretch(case: Case, layers: Sequence[AttentionLayer]) -> _Stretch:
    """Return how to stretch the rotary embedding of the layers that need it."""
    trained, longest = case.trained.tokens, longest_context(transformers_model(case.model).config) or 0
    for layer in layers:  # as a rule, all of them share one embedding
        rope = rope_of(layer)
        if rope is None or rope.kind == "dynamic":
            continue
        if not rope_parameters(layer.config, layer.kind):
            return _Stretch(
                problem="The rotary embedding fails beyond its length; its config has no entry to stretch it."
            )
        if not rope.stretched:
            return _yarn(case, [other for other in layers if is_unstretched(other, trained)])
        if rope.kind == "yarn":
            original = rope.original_length or trained
            if max(longest, (rope.factor or 1) * original) >= case.length:
                continue
            reason = f"The embedding is stretched to {max(longest, trained)} tokens only."
            return _raised(case, layer, _rounded(case.length / original), reason)
        if rope.kind in ("llama3", "linear") and rope.factor is not None:
            reason = f"The embedding ({rope}) reaches {trained} tokens only."
            warning = f"A larger factor of a {rope.kind} embedding, without training, was not measured by us."
            return _raised(case, layer, _rounded(rope.factor * case.times), reason, warning)
        return _Stretch(problem=_unstretchable(rope, trained))
    return _Stretch()


def _yarn(case: Case, layers: Sequence[AttentionLayer]) -> _Stretch:
    factor = _rounded(case.times)
    entries = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": case.trained.tokens}
    return _Stretch(
        (
            *dict.fromkeys(f"{_entry(case, layer)} |= {_literal(entries)}" for layer in layers),
            *dict.fromkeys(f"{_config(case, layer)}.max_position_embeddings = {case.length}" for layer in layers),
        ),
        (
            f"The rotary embedding is not stretched, and fails beyond {case.trained.tokens} tokens whatever the "
            f"temperature. YaRN stretches it by {factor:g}, for all texts, short ones included.",
        ),
        rope=f"yarn:{factor:g}",
    )


def _raised(case: Case, layer: AttentionLayer, factor: float, reason: str, *warnings: str) -> _Stretch:
    """Stretch an embedding further, by a larger factor of the same kind."""
    rope = rope_of(layer)
    statements = (
        f'{_entry(case, layer)}["factor"] = {factor!r}',
        f"{_config(case, layer)}.max_position_embeddings = {case.length}",
    )
    kind = rope is not None and rope.kind == "yarn"
    return _Stretch(statements, (reason,), warnings, f"yarn:{factor:g}" if kind else None)


def build_without_weights(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, with eager attention, which requires no package."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built: PreTrainedModel = cast("Any", kind)._from_config(config, attn_implementation="eager")
        return built


def _why_unbuildable(case: Case, stretch: _Stretch) -> str | None:
    """Return why transformers cannot build this model with the stretched embedding, or None."""
    if not stretch.statements:
        return None
    inner = transformers_model(case.model)
    config = copy.deepcopy(inner.config)
    try:
        exec("\n".join(stretch.statements), {"config": config})  # exactly what is printed
        built = build_without_weights(type(inner), config)
        for layer in find_attention_layers(built):
            find_existing(built, layer)
    except Exception as error:  # some classes compute with entries that this type of embedding does not have
        return (
            f"The rotary embedding is not stretched to {case.length} tokens, and transformers cannot do so for "
            f"{type(inner).__name__}: the config of {', '.join(stretch.statements[:1])} fails with {error!r}."
        )
    return None


def _unstretchable(rope: Rope, trained: int) -> str:
    if rope.kind == "longrope":
        return (
            f"The embedding (LongRoPE) has its frequencies for {trained} tokens in two lists; longer texts need other "
            "lists, which LongRoPE finds by a search."
        )
    return f"attnscale does not know how to stretch an embedding of the type {rope.kind!r} beyond {trained} tokens."


def _is_factor(existing: Existing) -> bool:
    """Whether a built-in scaling is one factor for every length, as for a stretched rotary embedding."""
    return existing.law is None or issubclass(POLICIES[existing.law["name"]], UniformPolicy)


def _keep(case: Case, formulas: Sequence[Existing], stretch: _Stretch) -> Advice:
    """Return the advice for a model that was trained with a law of its own."""
    reasons = (*stretch.reasons, f"The model was trained with a law of its own ({formulas[0].description}).")
    missing = ("A longer rotary embedding.",) if stretch.statements else ()
    command = None if stretch.statements else _command(case, stretch, None, formulas[0])
    setup = _setup(case, stretch) if stretch.statements else ()
    return Advice(
        "stretch" if stretch.statements else "keep", reasons, missing, stretch.warnings, setup=setup, command=command
    )


def _law(case: Case, layers: Sequence[AttentionLayer]) -> tuple[dict[str, Any], tuple[Evidence, ...]]:
    """Return the policy, and the measurements closest to the case."""
    nope = {positions_of(layer, case.model, position_table(case.model)) for layer in layers} == {NO_POSITIONS}
    name = "log_squared" if nope and case.times >= FAR else "log"
    law = {"name": name, "reference_length": case.trained.tokens, "floor": True}
    return law, (TINY_MODELS,) if nope else (SMOLLM2, TINY_MODELS)


def _explained(case: Case, law: Mapping[str, Any], replaces: bool) -> str:
    beta = (math.log(case.length) / math.log(case.trained.tokens)) ** (2 if law["name"] == "log_squared" else 1)
    text = f"{law['name']} is 1 up to {case.trained.tokens} tokens and {beta:.3g} at {case.length}"
    text += "; on_existing='replace' removes the factor of the stretched embedding" if replaces else ""
    other = "log_squared is sharper and costs more" if law["name"] == "log" else "log is milder and costs less"
    return f"{text} ({other}). Measure both on your model."


def _cautions(case: Case) -> tuple[str, ...]:
    config, found = transformers_model(case.model).config, []
    longest = longest_context(config) or 0
    if longest > case.trained.tokens and case.trained.source == ORIGINAL:
        found.append(
            f"If the model was also trained at its stretched length, which its config does not say, pass "
            f"trained_length={longest}."
        )
    if any(rope is not None and rope.kind == "dynamic" for rope in map(rope_of, case.far)):
        found.append(
            "The embedding is stretched with the length of the text (dynamic NTK): cached keys keep the rotation of "
            "the shorter text."
        )
    if any(map(has_position_bias, case.far)):
        found.append(
            "The position bias does not distinguish distances beyond its last bucket, which texts in training may not "
            "have reached."
        )
    inner = transformers_model(case.model)
    added = {name for layer in case.far if layer.rope is False for name in added_positions(inner, layer)}
    if added:
        found.append(
            f"Positions are added to the input ({', '.join(sorted(added))}); those beyond {case.trained.tokens} tokens "
            "were not seen in training."
        )
    if config.is_encoder_decoder:
        found.append("A long input is also read by cross-attention; cross=True includes it. Not measured by us.")
    elif not any(getattr(layer.module, "is_causal", True) for layer in case.layers):
        found.append("An encoder: every token sees all others, so n is the length of the text. Not measured by us.")
    left = [layer for layer in case.far if why_unsupported(layer, case.layers) is not None]
    if left:
        found.append(f"Without the unsupported layers {write_range(sorted({layer.layer for layer in left}))}.")
    return tuple(found)


def _keywords(case: Case, usable: Sequence[AttentionLayer]) -> dict[str, Any]:
    """Return the keyword `layers` of `apply` that selects these layers."""
    if len(usable) == len(case.layers):
        return {}
    if {layer.path for layer in usable} == {layer.path for layer in case.layers if layer.window is None}:
        return {"layers": "full"}
    return {"layers": write_range(sorted({layer.layer for layer in usable}))}


def _line(law: Mapping[str, Any], keywords: Mapping[str, Any]) -> str:
    parameters = {key: value for key, value in law.items() if key != "name"} | dict(keywords)
    return f'attnscale.hf.apply(model, "{law["name"]}", {", ".join(map(_keyword, parameters.items()))})'


def _keyword(item: tuple[str, Any]) -> str:
    return f"{item[0]}={_literal(item[1])}"


def _literal(value: Any) -> str:
    return repr(value).replace("'", '"')


def _config(case: Case, layer: AttentionLayer) -> str:
    """Return the expression for the config of a layer: that of the model, or of its text part, encoder or decoder."""
    config = transformers_model(case.model).config
    parts = {f"config.{name}": getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}}
    known = {"config": config, "config.get_text_config()": config.get_text_config()} | parts
    return next((name for name, part in known.items() if part is layer.config), "config.get_text_config()")


def _entry(case: Case, layer: AttentionLayer) -> str:
    """Return the expression for the rope parameters of a layer."""
    own = rope_parameters(layer.config, layer.kind) is not layer.config.rope_parameters
    return f"{_config(case, layer)}.rope_parameters" + (f'["{layer.kind}"]' if own else "")


def _setup(case: Case, stretch: _Stretch) -> tuple[str, ...]:
    """Return the statements before `apply`; none for a model in memory that needs no other config."""
    if case.in_memory and not stretch.statements:
        return ("import attnscale",)
    path = "path = " + (_literal(case.path) if case.path else '"MODEL"  # a folder or Hub id')
    start = ("import transformers", "", "import attnscale", "", path)
    load = f"model = transformers.{type(transformers_model(case.model)).__name__}.from_pretrained(path"
    if not stretch.statements:
        return (*start, f"{load})")
    config = "config = transformers.AutoConfig.from_pretrained(path)"
    return (*start, config, *stretch.statements, f"{load}, config=config)")


def _command(
    case: Case, stretch: _Stretch, law: Mapping[str, Any] | None, formula: Existing | None = None
) -> str | None:
    """Return an evaluation that compares the policies in question; None if `evaluate` cannot run it."""
    inner = transformers_model(case.model)
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(inner.config), None)
    if causal is not type(inner):
        return None
    if (stretch.statements and stretch.rope is None) or (stretch.rope is None and len(case.existing) > 1):
        return None
    own = formula or next(iter(case.existing), None)
    options, policies = [], ["constant"]
    if stretch.rope is not None:
        options.append(f"--rope {stretch.rope}")
        policies.append(f"yarn:factor={stretch.rope.partition(':')[2]}")
    elif own is not None:
        if own.fixed is not None or own.law is None or own.law["name"] == "ssmax":
            return None
        options.append("--on-existing replace")
        policies.append(":".join([own.law["name"], *(f"{k}={v}" for k, v in own.law.items() if k != "name")]))
    trained = case.trained.tokens
    steps = [trained * 2**power for power in range(math.ceil(math.log2(case.times)))]
    lengths = ",".join(map(str, [*steps, case.length]))
    chosen = ",".join([*policies, "log", "log_squared"])
    path = case.path or "MODEL"
    return (
        f"attnscale evaluate {path} {' '.join([*options, ''])}--trained-length {trained} --policies {chosen} "
        f"--lengths {lengths} --text FILE"
    )


def _rounded(factor: float) -> float:
    """Round a factor up to two digits after the point."""
    return math.ceil(round(100 * factor, 6)) / 100
