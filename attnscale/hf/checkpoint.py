"""Load policies with what they have learned: together with their model, or into a model that is there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from attnscale.errors import ArgumentError, MissingDependencyError, reject
from attnscale.hf.attach import attach, install_recorded
from attnscale.hf.attention_layers import routed_layers, transformers_model
from attnscale.hf.config_record import DESCRIPTION, MODULES, ON_EXISTING, configs_of, locate
from attnscale.hf.install import Handle
from attnscale.hf.policy_files import (
    ADAPTER_CONFIG,
    MODEL_CONFIG,
    MODEL_WEIGHTS,
    POLICY_CONFIG,
    POLICY_WEIGHTS,
    StoredFiles,
    is_of_policy,
    split_name,
)
from attnscale.hf.sites import NAME

# What PEFT puts in front of the names of a model: with a tuner, or without where the method only adds to the inputs.
_IN_TUNER, _IN_WRAPPER = "base_model.model.", "base_model."

# The class attribute with patterns of keys that transformers does not report as unexpected.
_IGNORED = "_keys_to_ignore_on_load_unexpected"
_POLICY_KEYS = rf"(^|\.){NAME}\."
_INHERITED = object()


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> Handle:
    """A model saved by `save_pretrained` while a policy was applied, with the policy and what it has learned.

    The path is a folder or the id of a repository on the HuggingFace Hub. If it holds an adapter of PEFT, the model
    that the adapter names as its base is loaded first. The class is the one that was saved unless another is given;
    further arguments are those of `from_pretrained`. The model is `handle.model`.

        handle = attnscale.hf.load("run/checkpoint-1000")
        handle.model.generate(...)
    """
    files = StoredFiles(path, arguments)
    config = files.json(MODEL_CONFIG)
    if config is None:
        adapter = files.json(ADAPTER_CONFIG)
        if adapter is not None:
            return _load_adapted(files, adapter, model_class, arguments)
        reject("path", str(path), "a folder that save_pretrained wrote, or the id of such a repository on the Hub")
    record = record_in(config)
    if record is None:
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: its config.json has no 'attnscale'; use from_pretrained"
        )
    model = _load_stock(path, config, model_class, arguments)
    return install_recorded(model, record, lambda inner: _learned_in_checkpoint(files, inner), str(path))


def load_policy(model: nn.Module, path: str | Path, **arguments: Any) -> Handle:
    """Give a model the policies that a folder or a repository on the HuggingFace Hub holds, and what they have learned.

    The folder is one that `handle.save` wrote; or an adapter that PEFT saved while a policy was applied; or a whole
    model's checkpoint. `arguments` say where a repository is, as for `from_pretrained`: `revision`, `token`,
    `cache_dir`, `subfolder`.

        handle = attnscale.hf.load_policy(model, "run/adapter")
        model = peft.PeftModel.from_pretrained(model, "run/adapter")
    """
    files = StoredFiles(path, arguments)
    record: Mapping[str, Any] | None = files.json(POLICY_CONFIG)
    learned = None if record is None else files.tensors(POLICY_WEIGHTS)
    if record is None:
        record, learned = read_adapter(files.adapter_tensors())
    if record is None:
        record, learned = record_in(files.json(MODEL_CONFIG) or {}), None
    if record is None:
        raise ArgumentError(
            f"path={files.path!r} is not accepted: it has neither {POLICY_CONFIG}, nor an adapter with a policy, nor a "
            f"{MODEL_CONFIG} with 'attnscale'"
        )

    def read(inner: PreTrainedModel) -> dict[str, Tensor]:
        return located(_learned_in_checkpoint(files, inner) if learned is None else learned, model)

    return install_recorded(model, record, read, str(path))


def read_adapter(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """The record of the policies in the tensors of an adapter, or None, and what they have learned."""
    named = {name.removeprefix(_IN_TUNER).removeprefix(_IN_WRAPPER): value for name, value in tensors.items()}
    parts = {name: split_name(name) for name in named if is_of_policy(name)}
    modules = {
        path: json.loads(bytes(named[name].tolist())) for name, (path, rest) in parts.items() if rest == DESCRIPTION
    }
    learned = {name: named[name] for name, (_, rest) in parts.items() if rest != DESCRIPTION}
    record: dict[str, Any] = {MODULES: modules}
    for entry in modules.values():
        if ON_EXISTING in entry:
            record[ON_EXISTING] = entry.pop(ON_EXISTING)
    return (record if modules else None), learned


def located(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors of policies under their names in a transformers model that may have another head, or a wrapper."""
    parts = {name: split_name(name) for name in tensors if is_of_policy(name)}
    prefix = transformers_model(model).base_model_prefix
    paths = locate((path for path, _ in parts.values()), routed_layers(model), prefix)
    return {f"{paths[path]}.{NAME}.{rest}": tensors[name] for name, (path, rest) in parts.items() if path in paths}


def _load_stock(
    path: str | Path, config: Mapping[str, Any], model_class: type[PreTrainedModel] | None, arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """The model of a folder or repository with the data of its config.json, without policies."""
    kind = model_class or getattr(transformers, (config.get("architectures") or ["AutoModel"])[0], None)
    if kind is None:
        reject("model_class", None, f"the class of the model, {config['architectures'][0]}: transformers has none")
    given = {key: value for key, value in arguments.items() if (key, value) != ("attn_implementation", NAME)}
    # None: what transformers would choose. The policies come afterwards, with what they have learned.
    with _policies_expected(kind, config):
        model: PreTrainedModel = kind.from_pretrained(path, **{"attn_implementation": None} | given)
    for loaded in configs_of(model):
        loaded.__dict__.pop(NAME, None)
    return model


def _load_adapted(
    files: StoredFiles,
    adapter: Mapping[str, Any],
    model_class: type[PreTrainedModel] | None,
    arguments: Mapping[str, Any],
) -> Handle:
    """A PEFT model with the policies of its adapter, given the data of adapter_config.json."""
    base = str(adapter.get("base_model_name_or_path") or "")
    where = {"revision": adapter.get("revision")} if adapter.get("revision") else {}
    given = {key: value for key, value in arguments.items() if key not in ("revision", "subfolder", "is_trainable")}
    try:
        config = StoredFiles(base, given | where).json(MODEL_CONFIG) if base else None
    except ArgumentError:
        config = None
    if config is None:
        raise ArgumentError(
            f"path={files.path!r} is not accepted: its adapter names the base model {base!r}, which is not there; load "
            "the model that it was trained on, then call attnscale.hf.load_policy(model, path) and "
            "peft.PeftModel.from_pretrained(model, path)"
        )
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(f"path={files.path!r} holds an adapter of PEFT: pip install peft") from error
    model = _load_stock(base, config, model_class, given | where)
    load_policy(model, files.path, **files.where)
    trainable = bool(arguments.get("is_trainable", False))
    return attach(peft.PeftModel.from_pretrained(model, files.path, is_trainable=trainable, **files.where))


def record_in(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry 'attnscale' of the data of a config.json, or else of a part of it."""
    record = config.get(NAME)
    if isinstance(record, Mapping):
        return record
    parts = (record_in(part) for part in config.values() if isinstance(part, Mapping))
    return next((part for part in parts if part is not None), None)


def _learned_in_checkpoint(files: StoredFiles, model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of policies in a model's safetensors, under their names in the model.

    `save_pretrained` writes the names of the original checkpoint where a type has others, as `from_pretrained` reads
    them: nomic_bert.layers.0 is encoder.layers.0 in the file.
    """
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, value in files.tensors(MODEL_WEIGHTS).items() if any(map(is_of_policy, state)) else ():
        renamed = rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]
        found[name if name in state else renamed] = value
    return found


@contextlib.contextmanager
def _policies_expected(kind: type, config: Mapping[str, Any]) -> Iterator[None]:
    """Keep transformers from reporting the tensors of policies as unexpected; they are read afterwards.

    For an auto class it is the class that it builds for a config, given as the data of config.json.
    """
    model_class = _built_class(kind, config)
    if model_class is None:
        yield
        return
    own = vars(model_class).get(_IGNORED, _INHERITED)
    setattr(model_class, _IGNORED, {*(getattr(model_class, _IGNORED, None) or ()), _POLICY_KEYS})
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(model_class, _IGNORED)
        else:
            setattr(model_class, _IGNORED, own)


def _built_class(kind: type, config: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """The class that `kind.from_pretrained` builds; None where transformers does not know it."""
    if issubclass(kind, PreTrainedModel):
        return kind
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return None
    mapped = getattr(kind, "_model_mapping", {}).get(CONFIG_MAPPING[model_type], None)
    known = {model.__name__: model for model in (mapped if isinstance(mapped, tuple) else (mapped,)) if model}
    saved = [known[name] for name in config.get("architectures") or () if name in known]
    return next(iter([*saved, *known.values()]), None)
