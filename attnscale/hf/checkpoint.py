"""Load policies and their learned values, together with a model or into an existing one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file

from attnscale._util import state
from attnscale._util.optional import need
from attnscale.errors import ArgumentError, MissingDependencyError, reject
from attnscale.hf.attach import attach, described_policies
from attnscale.hf.attention_layers import transformers_model
from attnscale.hf.config_record import configs_of, locate_in
from attnscale.hf.install import POLICY_CONFIG, POLICY_WEIGHTS, Handle, install
from attnscale.policies.record import (
    ARCHITECTURE_PREFIX,
    DESCRIPTION,
    MODULES,
    NAME,
    ON_EXISTING,
    find_record,
    is_of_policy,
    split_name,
)

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_MODEL_WEIGHTS = "model.safetensors"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED_ADAPTER_WEIGHTS = "adapter_model.bin"

# Arguments of `from_pretrained` that locate a repository and its files.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Prefixes that PEFT adds to parameter names: with a tuner, and without one (methods that only add inputs).
_IN_TUNER, _IN_WRAPPER = "base_model.model.", "base_model."

Record = Mapping[str, Any]


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> Handle:
    """Load a model or PEFT adapter that was saved with a policy, including the learned values of the policy.

    For an adapter, the base model named in its config is loaded first.

    Args:
        path: a folder, or a repository id on the HuggingFace Hub.
        model_class: class of the model; by default the class that was saved.
        **arguments: arguments of `from_pretrained`.

    Returns:
        The `Handle` of the policies; the model is `handle.model`.

    Raises:
        ArgumentError: the path holds no model or adapter, or one without a policy, or lacks learned values.
        MissingDependencyError: the path holds an adapter and peft is not installed.

    Example:
        >>> import tempfile
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        >>> with tempfile.TemporaryDirectory() as folder, attnscale.hf.apply(model, "ssmax"):
        ...     model.save_pretrained(folder)
        ...     handle = attnscale.hf.load(folder)
        >>> list(handle.policies)
        ['transformer.h.0.attn']
    """
    files = StoredFiles(path, arguments)
    config = files.json(MODEL_CONFIG)
    if config is None:
        adapter = files.json(ADAPTER_CONFIG)
        if adapter is not None:
            return _load_adapted(files, adapter, model_class, arguments)
        reject("path", str(path), f"a folder or a repository id on the Hub with {MODEL_CONFIG} or {ADAPTER_CONFIG}")
    record = find_record(config)
    if record is None:
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: its {MODEL_CONFIG} has no entry 'attnscale'; use from_pretrained"
        )
    model = _load_stock(path, config, model_class, arguments)
    return _install_recorded(model, record, lambda: _learned_in_checkpoint(files, model), files.path)


def load_policy(model: nn.Module, path: str | Path, **arguments: Any) -> Handle:
    """Load policies and their learned values into an existing model.

    Args:
        model: a transformers model, or a wrapper of one, without a policy.
        path: a folder or a repository id on the HuggingFace Hub: the output of `handle.save`, a PEFT adapter saved
            with a policy, or a whole checkpoint saved with a policy.
        **arguments: location of the repository, as for `from_pretrained`: `revision`, `token`, `cache_dir`,
            `subfolder`.

    Returns:
        The `Handle` of the policies.

    Raises:
        ArgumentError: the path holds no policy or lacks learned values, or the model already has a policy.

    Example:
        >>> import tempfile
        >>> import attnscale
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with attnscale.hf.apply(model, "log", reference_length=8192) as handle:
        ...         handle.save(folder)
        ...     attnscale.hf.load_policy(model, folder).policies
        {'transformer.h.0.attn': Log(...reference_length=8192...)}
    """
    files = StoredFiles(path, arguments)
    record: Record | None = files.json(POLICY_CONFIG)
    learned = None if record is None else files.tensors(POLICY_WEIGHTS)
    if record is None:
        record, learned = read_adapter(files.adapter_tensors())
    if record is None:
        record, learned = find_record(files.json(MODEL_CONFIG) or {}), None
    if record is None:
        raise ArgumentError(
            f"path={files.path!r} is not accepted: expected {POLICY_CONFIG}, an adapter with a policy, or a "
            f"{MODEL_CONFIG} with an entry 'attnscale'"
        )

    def read() -> dict[str, Tensor]:
        found = _learned_in_checkpoint(files, transformers_model(model)) if learned is None else learned
        return located(found, model)

    return _install_recorded(model, record, read, files.path)


def _install_recorded(model: nn.Module, record: Record, read: Callable[[], Mapping[str, Tensor]], path: str) -> Handle:
    """Install the policies of a record, then load their learned values with `read`.

    `read` returns tensors under their names in the transformers model. `path` is used in error messages.
    """
    on_existing = record.get(ON_EXISTING, "raise")
    handle = install(model, described_policies(model, record), on_existing=on_existing, loaded=True)
    inner = transformers_model(model)
    try:
        learned = read()
        wanted = [name for name in inner.state_dict() if is_of_policy(name)]
        missing = [name for name in wanted if name not in learned]
        if missing:
            raise ArgumentError(f"path={path!r} is not accepted: its safetensors file lacks {missing[0]}")
        inner.load_state_dict({name: learned[name] for name in wanted}, strict=False)
    except BaseException:
        handle.remove()
        raise
    return handle


def _load_stock(
    path: str | Path, config: Record, model_class: type[PreTrainedModel] | None, arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """Load the model of a folder or repository without policies; `config` is the content of its config.json."""
    saved = str((config.get("architectures") or ["AutoModel"])[0]).removeprefix(ARCHITECTURE_PREFIX)
    kind = model_class or getattr(transformers, saved, None)
    if kind is None:
        reject("model_class", None, f"the class {config['architectures'][0]}, which transformers does not have")
    given = {key: value for key, value in arguments.items() if (key, value) != ("attn_implementation", NAME)}
    token = state.HF_READ_LATER.set(True)
    try:  # None: the default of transformers
        model: PreTrainedModel = kind.from_pretrained(path, **{"attn_implementation": None} | given)
    finally:
        state.HF_READ_LATER.reset(token)
    for loaded in configs_of(model):
        loaded.__dict__.pop(NAME, None)
    return model


def _load_adapted(
    files: StoredFiles, adapter: Record, model_class: type[PreTrainedModel] | None, arguments: Mapping[str, Any]
) -> Handle:
    """Load a PEFT model with the policies of its adapter; `adapter` is the content of its adapter_config.json."""
    base = str(adapter.get("base_model_name_or_path") or "")
    where = {"revision": adapter.get("revision")} if adapter.get("revision") else {}
    given = {key: value for key, value in arguments.items() if key not in ("revision", "subfolder", "is_trainable")}
    try:
        config = StoredFiles(base, given | where).json(MODEL_CONFIG) if base else None
    except ArgumentError:
        config = None
    if config is None:
        raise ArgumentError(
            f"path={files.path!r} is not accepted: the base model {base!r} of its adapter was not found; load the base "
            "model, then call attnscale.hf.load_policy(model, path) and peft.PeftModel.from_pretrained(model, path)"
        )
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(f"path={files.path!r} holds a PEFT adapter: pip install peft") from error
    model = _load_stock(base, config, model_class, given | where)
    load_policy(model, files.path, **files.where)
    trainable = bool(arguments.get("is_trainable", False))
    return attach(peft.PeftModel.from_pretrained(model, files.path, is_trainable=trainable, **files.where))


def read_adapter(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return the record of the policies in an adapter's tensors, or None, and their learned values."""
    modules: dict[str, Any] = {}
    learned: dict[str, Tensor] = {}
    for name, value in tensors.items():
        inner = name.removeprefix(_IN_TUNER).removeprefix(_IN_WRAPPER)
        path, rest = split_name(inner)
        if rest == DESCRIPTION:
            modules[path] = json.loads(bytes(value.tolist()))
        elif is_of_policy(inner):
            learned[inner] = value
    record: dict[str, Any] = {MODULES: modules}
    for entry in modules.values():
        if ON_EXISTING in entry:
            record[ON_EXISTING] = entry.pop(ON_EXISTING)
    return (record if modules else None), learned


def located(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename policy tensors to their names in a transformers model, which may have another head or a wrapper."""
    parts = {name: split_name(name) for name in tensors if is_of_policy(name)}
    paths = locate_in(model, (path for path, _ in parts.values()))
    return {f"{paths[path]}.{NAME}.{rest}": tensors[name] for name, (path, rest) in parts.items() if path in paths}


def _learned_in_checkpoint(files: StoredFiles, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the policy tensors in a model's safetensors, under their names in the model.

    For some model types `save_pretrained` writes the names of the original checkpoint: nomic_bert.layers.0 is
    encoder.layers.0 in the file.
    """
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    own = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, value in files.tensors(_MODEL_WEIGHTS).items() if any(map(is_of_policy, own)) else ():
        renamed = rename_source_key(name, renamings, [], model.base_model_prefix, own)[0]
        found[name if name in own else renamed] = value
    return found


class StoredFiles:
    """Files of a folder or of a Hub repository, located as `from_pretrained` does."""

    def __init__(self, path: str | Path, arguments: Mapping[str, Any]) -> None:
        self.path = str(path)
        self.where = {key: arguments[key] for key in _WHERE if key in arguments}

    def file(self, name: str) -> Path | None:
        """Return the path of a file, or None if it does not exist."""
        try:
            found = cached_file(self.path, name, **self.where, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"path={self.path!r} is not accepted: expected a folder or a repository id on the Hub "
                f"({str(error).splitlines()[0]})"
            ) from error
        return None if found is None else Path(found)

    def json(self, name: str) -> dict[str, Any] | None:
        """Return the content of a JSON file, or None if it does not exist."""
        file = self.file(name)
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the policy tensors in a safetensors file, or in all shards named by its index."""
        index = self.json(f"{name}.index.json")
        parts = {name} if index is None else {part for key, part in index["weight_map"].items() if is_of_policy(key)}
        safe_open = need("safetensors", "attnscale.hf.load", "hf").safe_open
        found: dict[str, Tensor] = {}
        for file in filter(None, map(self.file, sorted(parts))):
            with safe_open(file, framework="pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if is_of_policy(key)}  # noqa: SIM118
        return found

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the policy tensors in an adapter, in either format of PEFT."""
        found = self.tensors(_ADAPTER_WEIGHTS)
        file = None if found else self.file(_PICKLED_ADAPTER_WEIGHTS)
        pickled = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
        return found | {key: value for key, value in pickled.items() if is_of_policy(key)}
