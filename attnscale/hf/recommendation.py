"""`recommend`: what a model needs to read longer texts, from its config alone, in seconds and without data."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from attnscale._util.checks import read_int
from attnscale._util.ranges import write_range
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.hf.advice import HEADLINES, Advice, Case, Evidence, Verdict, advise, build_without_weights
from attnscale.hf.attention_layers import AttentionLayer, find_attention_layers, transformers_model
from attnscale.hf.config_record import record_of
from attnscale.hf.context import TrainedLength, find_trained_length, position_table, positions_of
from attnscale.hf.existing import find_existing
from attnscale.hf.selection import why_unsupported
from attnscale.hf.sites import MonitoredSite, site_of
from attnscale.policies.record import ARCHITECTURE_PREFIX, MODULES, read_modules

_PASSED = "as passed"
_WIDTH = 100
_SEQ_TO_SEQ = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)


@dataclass(frozen=True)
class Recommendation:
    """The result of `recommend`; `str()` gives the text that `attnscale recommend` prints.

    Attributes:
        model: class name of the model.
        length: the length to read, in tokens.
        verdict: "unneeded", "apply", "stretch" (the rotary embedding first), "compare" (with the model's own factor),
            "keep" (the model's own law), "applied", "impossible", "unsupported" or "unknown".
        trained_length: the length at which the model was trained, or None.
        trained_source: where the trained length was read.
        positions: how the layers encode positions, one entry per kind.
        windows: sliding windows, one entry per size.
        existing: built-in scaling of the logits.
        policy: the recommended policy as plain data, or None.
        line: the call that applies it, or None.
        setup: statements before this call: the loading of the model, with a stretched rotary embedding if necessary.
        reasons, missing, warnings: sentences.
        command: an evaluation on your own text, or None if `attnscale evaluate` does not cover the case.
        evidence: measurements and publications, with links.

    Example:
        >>> import attnscale
        >>> from transformers import LlamaConfig
        >>> found = attnscale.hf.recommend(LlamaConfig(max_position_embeddings=8192), 32768)
        >>> found.verdict, found.trained_length, found.policy
        ('stretch', 8192, {'name': 'log', 'reference_length': 8192, 'floor': True})
    """

    model: str
    length: int
    verdict: Verdict
    trained_length: int | None
    trained_source: str
    positions: tuple[str, ...] = ()
    windows: tuple[str, ...] = ()
    existing: tuple[str, ...] = ()
    policy: Mapping[str, Any] | None = None
    line: str | None = None
    setup: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    command: str | None = None
    evidence: tuple[Evidence, ...] = ()

    @property
    def code(self) -> str | None:
        """The program to paste, or None."""
        lines = [*self.setup, *([] if self.line is None else [self.line])]
        return "\n".join(lines) if lines else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as printed by `attnscale recommend --json`."""
        plain = dataclasses.asdict(self)
        plain["evidence"] = [one._asdict() for one in self.evidence]
        return plain | {"code": self.code}

    def __str__(self) -> str:
        trained = "unknown" if self.trained_length is None else f"{self.trained_length} tokens ({self.trained_source})"
        facts = {
            "trained length": (trained,),
            "positions": self.positions,
            "windows": self.windows,
            "own scaling": self.existing,
        }
        width = max(map(len, facts)) + 2
        lines = [f"{self.model} at {self.length} tokens: {HEADLINES[self.verdict]}", ""]
        for name, values in facts.items():
            lines += _wrapped(name.ljust(width), "; ".join(values) or "none")
        lines += [""] + [line for reason in self.reasons for line in _wrapped("", reason)]
        for name, texts in (("Missing: ", self.missing), ("Warning: ", self.warnings)):
            lines += [line for text in texts for line in _wrapped(name, text)]
        if self.code is not None:
            lines += ["", *(f"    {line}".rstrip() for line in self.code.splitlines())]
        if self.command is not None:
            lines += ["", "Measure it on your text:", f"    {self.command}"]
        if self.evidence:
            lines += ["", "Evidence, none of it from your model:"]
            lines += [line for one in self.evidence for line in (*_wrapped("- ", one.text), f"  {one.link}")]
        return "\n".join(lines)


def _wrapped(name: str, text: str) -> list[str]:
    """Wrap a text behind a name."""
    return textwrap.wrap(text, _WIDTH, initial_indent=name, subsequent_indent=" " * len(name), break_on_hyphens=False)


def recommend(
    model: nn.Module | PreTrainedConfig | str | Path, length: int, *, trained_length: int | None = None
) -> Recommendation:
    """Return what a model needs to read texts of a given length: a policy, a stretched rotary embedding, or nothing.

    Reads the config and the structure of the model, no weights and no data, and does not access the Hub. The advice
    follows measurements on other models: confirm it with `attnscale evaluate`.

    Args:
        model: a folder with the config.json of a transformers model, its config, or a model. For another
            `torch.nn.Module`, also pass `trained_length`.
        length: the length to read, in tokens.
        trained_length: the length at which the model was trained, if its config is missing or wrong.

    Returns:
        A `Recommendation`. Print it for a text with the lines to paste.

    Raises:
        ArgumentError: an argument is invalid, or no model can be built from the config.
        ArgumentTypeError: `model` has another type.

    Example:
        >>> import attnscale
        >>> from transformers import GPT2Config
        >>> attnscale.hf.recommend(GPT2Config(), 4096).reasons
        ('Positions are read from a table with 1024 entries; later tokens have no position.',)
    """
    length = read_int("length", length, "an int >= 1", least=1)
    if trained_length is not None:
        trained_length = read_int("trained_length", trained_length, "an int >= 2", least=2)
    built, path = _open(model)
    if not any(isinstance(module, PreTrainedModel) for module in built.modules()):
        return _for_modules(built, length, trained_length)
    name, layers = type(transformers_model(built)).__name__, find_attention_layers(built)
    own = [layer for layer in layers if layer.text and not layer.cross]
    table, config = position_table(built), transformers_model(built).config
    found = find_trained_length(config)
    source = "" if found is None else f"{found.source} of the config"
    if trained_length is not None:
        found, source = TrainedLength(trained_length, "trained_length"), _PASSED
    advice = _advise(Case(built, length, found, path, built is model, own)) if found else _advise_unknown(built, own)
    return Recommendation(
        name,
        length,
        advice.verdict,
        None if found is None else found.tokens,
        source,
        _grouped(own, [positions_of(layer, built, table) for layer in own]),
        _grouped(own, [None if layer.window is None else f"{layer.window} keys" for layer in own]),
        tuple(dict.fromkeys(one.description for layer in own for one in find_existing(built, layer))),
        advice.policy,
        advice.line,
        advice.setup,
        advice.reasons,
        advice.missing,
        advice.warnings,
        advice.command,
        advice.evidence,
    )


def _advise(case: Case) -> Advice:
    return _advise_without_length(case.model, case.layers) or advise(case)


def _advise_unknown(model: nn.Module, layers: Sequence[AttentionLayer]) -> Advice:
    unknown = Advice("unknown", (), ("The length at which the model was trained: pass trained_length=...",))
    return _advise_without_length(model, layers) or unknown


def _advise_without_length(model: nn.Module, layers: Sequence[AttentionLayer]) -> Advice | None:
    """Return the advice that does not depend on lengths: no attention, or a policy that is there already."""
    if not layers:
        return Advice("unsupported", ("It has no softmax attention in a text part.",))
    refused = [why_unsupported(layer, layers) for layer in layers]
    if None not in refused:
        return Advice("unsupported", (f"{layers[0].path} {refused[0]}.",))
    policies = [site.policy for layer in layers if (site := site_of(layer.module)) and type(site) is not MonitoredSite]
    record = record_of(model)
    if policies:
        return Advice("applied", (f"The model has a policy: {policies[0]}. handle.remove() restores the stock model.",))
    if record is not None:
        first = next(iter(read_modules(record).values()), None) if MODULES in record else dict(record)
        return Advice("applied", (f"The config names a policy, {first}: attnscale.hf.load(path) applies it.",))
    return None


def _for_modules(model: nn.Module, length: int, trained_length: int | None) -> Recommendation:
    """Return the recommendation for a model outside of transformers."""
    name, source = type(model).__name__, _PASSED
    reason = "Not a transformers model: its positions and windows are unknown."
    convertible = any(type(module) is nn.MultiheadAttention for module in model.modules())
    if trained_length is None:
        missing = ("The length at which the model was trained: pass trained_length=...",)
        return Recommendation(name, length, "unknown", None, "", reasons=(reason,), missing=missing)
    if length <= trained_length:
        reasons = (f"The model was trained at {trained_length} tokens.",)
        return Recommendation(name, length, "unneeded", trained_length, source, reasons=reasons)
    law = {"name": "log", "reference_length": trained_length, "floor": True}
    call = f'"log", reference_length={trained_length}, floor=True)'
    missing = ("Positions that reach this length; no temperature replaces them.",)
    if not convertible:
        instead = f"Call attnscale.ScaledDotProductAttention({call} instead of F.scaled_dot_product_attention."
        return Recommendation(
            name, length, "unsupported", trained_length, source, policy=law, reasons=(reason, instead), missing=missing
        )
    return Recommendation(
        name,
        length,
        "apply",
        trained_length,
        source,
        policy=law,
        line=f"attnscale.convert(model, {call}",
        setup=("import attnscale",),
        reasons=(reason,),
        missing=missing,
    )


def _grouped(layers: Sequence[AttentionLayer], texts: Sequence[str | None]) -> tuple[str, ...]:
    """Return the different texts with the layers they hold for, unless they hold for all; None is omitted."""
    pairs = sorted(zip(texts, layers, strict=True), key=lambda pair: texts.index(pair[0]))
    groups = [(text, [layer.layer for _, layer in some]) for text, some in itertools.groupby(pairs, lambda p: p[0])]
    return tuple(
        text if len(groups) == 1 else f"{text} (layers {write_range(sorted(set(numbers)))})"
        for text, numbers in groups
        if text is not None
    )


def _open(model: object) -> tuple[nn.Module, str | None]:
    """Return a model, without weights unless it was passed, and the folder or Hub id it comes from."""
    if isinstance(model, nn.Module):
        inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        return model, None if inner is None else inner.config.name_or_path or None
    if isinstance(model, PreTrainedConfig):
        return _skeleton(copy.deepcopy(model)), model.name_or_path or None
    if not isinstance(model, (str, Path)):
        reject_type("model", model, "a folder, a transformers config, or a model")
    folder = Path(model)
    if not (folder / "config.json").is_file():
        hub = f"; download a model with `hf download {model} --local-dir FOLDER`" if not folder.exists() else ""
        reject("model", str(model), f"a folder with the config.json of a transformers model{hub}")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file can raise almost any exception
        why = " ".join(str(error).split()).partition(". ")[0]
        raise ArgumentError(f"model={str(model)!r} is not accepted: its config.json cannot be read: {why}") from error
    return _skeleton(config), str(model)


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a config on the meta device, in the class that its config names."""
    named = [name.removeprefix(ARCHITECTURE_PREFIX) for name in config.architectures or ()]
    kinds: list[Any] = [getattr(transformers, name) for name in named if hasattr(transformers, name)]
    first = _SEQ_TO_SEQ if config.is_encoder_decoder else ()
    for mapping in (*first, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        kind = mapping.get(type(config), ())
        kinds += kind if isinstance(kind, (tuple, list)) else [kind]
    if not kinds:
        reject("model", type(config).__name__, "a config of a model that transformers can build")
    failure: Exception | None = None
    for kind in kinds:
        try:
            return build_without_weights(kind, config)
        except Exception as error:  # a config may lack what its class needs
            failure = error
    raise ArgumentError(f"no {kinds[0].__name__} can be built from the config: {failure!r}") from failure
