"""Policies in the files of transformers and PEFT: saved with models, adapters and Trainer state, checked on loading.

Importing `attnscale.hf` wraps the methods of transformers and PEFT that save and load models, adapters and Trainer
state. Models without policies are saved and loaded unchanged.

- `adapter_config.json` names the policies, so that PEFT without attnscale warns about an unknown entry. The policies
  themselves are stored with the adapter's weights (`peft_sites`).
- `trainer_state.json` names the policies, so that a Trainer without attnscale does not resume.
- A model whose policies are still pending gets them before it is saved, or on loading if they replace its own scaling.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback, TrainerState
from transformers import trainer as transformers_trainer
from transformers.integrations.peft import PeftAdapterMixin

from attnscale._util import state
from attnscale._util.files import write_whole
from attnscale._util.wrapping import wrap_method
from attnscale.errors import ArgumentError, AttnScaleWarning
from attnscale.hf.attach import attach, current_record, described_policies, is_learned
from attnscale.hf.attention_layers import routed_layers, transformers_model
from attnscale.hf.checkpoint import ADAPTER_CONFIG, MODEL_CONFIG, Record, StoredFiles, located, read_adapter
from attnscale.hf.compatibility import DROPS_IMPLEMENTATION, keep_implementation, loading_info
from attnscale.hf.config_record import is_pending, locate_in, record_of, recorded_on_existing
from attnscale.hf.sites import MonitoredSite, Site, is_called, site_of
from attnscale.policies.record import DESCRIPTION, NAME, ON_EXISTING, is_of_policy, read_modules, split_name

Method = Callable[..., Any]


def keep_policies() -> None:
    """Wrap the methods that save and load models, adapters and Trainer state. Idempotent."""
    wrap_method(PreTrainedModel, "save_pretrained", _save_model)
    wrap_method(PreTrainedModel, "from_pretrained", _load_model)
    wrap_method(PreTrainedModel, "_load_pretrained_model", _load_weights)
    if DROPS_IMPLEMENTATION:
        wrap_method(PreTrainedConfig, "from_dict", _read_config)
    wrap_method(PeftAdapterMixin, "load_adapter", _load_own_adapter)
    wrap_method(transformers_trainer.Trainer, "train", _train)
    wrap_method(TrainerState, "save_to_json", _save_state)
    wrap_method(TrainerState, "load_from_json", _load_state)
    callbacks: list[type[TrainerCallback]] = transformers_trainer.DEFAULT_CALLBACKS  # type: ignore[assignment]
    if RecordInState not in callbacks:
        callbacks.append(RecordInState)
    if find_spec("peft") is None:
        return
    from peft import PeftModel
    from peft.config import PeftConfigMixin
    from peft.utils import hotswap

    wrap_method(PeftModel, "save_pretrained", _save_adapters)
    wrap_method(PeftModel, "load_adapter", _load_adapter)
    wrap_method(PeftConfigMixin, "to_dict", _write_adapter_config)
    wrap_method(PeftConfigMixin, "from_json_file", _read_adapter_config)
    wrap_method(hotswap, "hotswap_adapter_from_state_dict", _swap_adapter)


def _save_model(stock: Method, model: PreTrainedModel, /, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.save_pretrained`: a whole model, or an adapter added through transformers."""
    record = _record_to_save(model)
    with _saving(record, [Path(save_directory, name) for name in (MODEL_CONFIG, ADAPTER_CONFIG)]):
        return stock(model, save_directory, *args, **kwargs)


def _save_adapters(stock: Method, model: Any, /, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.save_pretrained`: adapters."""
    record = _record_to_save(model)
    given = inspect.signature(stock).bind(model, save_directory, *args, **kwargs).arguments
    names = (given.get("selected_adapters") or model.peft_config) if given.get("is_main_process", True) else ()
    files = [Path(save_directory, "" if name == "default" else name, ADAPTER_CONFIG) for name in names]
    with _saving(record, files):
        if record is not None:
            for file in files:
                _announce(file, record)
        return stock(model, save_directory, *args, **kwargs)


def _record_to_save(model: nn.Module) -> Record | None:
    """Return the record of a model's policies; pending policies are installed first.

    Warns if the model's attention implementation bypasses the policies in its config.
    """
    record = current_record(model)
    if record is not None and is_pending(model):
        attach(model)
    if record_of(model) is None:
        return record
    sites = [(layer, site_of(layer.module)) for layer in routed_layers(model).values()]
    own = [(layer, site) for layer, site in sites if site is not None and not isinstance(site, MonitoredSite)]
    if own:
        bypassed = [layer for layer, site in own if not is_called(site, layer.module)]
        advice = (
            f"to save it with the policy, call model.set_attn_implementation({NAME!r}) first; to save it without, "
            "call attnscale.hf.attach(model).remove()"
        )
    else:
        bypassed = [layer for layer, _ in sites if layer.config._attn_implementation != NAME]
        advice = (
            "to save it with the policy, load it with attnscale.hf.load(path); to save it without, delete the "
            "attribute attnscale of its config"
        )
    if bypassed:
        _warn(
            f"the model runs with attn_implementation={bypassed[0].config._attn_implementation!r}, which bypasses the "
            f"policy in its config; a model loaded from this checkpoint may give other results: {advice}"
        )
    return record


@contextmanager
def _saving(record: Record | None, configs: Iterable[Path]) -> Iterator[None]:
    """Make PEFT write a record into each adapter_config.json.

    If saving fails before the weights are written, the earlier configs in the folder are restored. Otherwise the
    earlier weights would get the policies of this model: transformers writes configs first, and `_announce` changes
    the configs that PEFT writes last.
    """
    before = {file: (file.read_bytes(), _versions(file.parent)) for file in configs if file.is_file()}
    token = state.HF_SAVED_RECORD.set(record)
    try:
        yield
    except BaseException:
        for file, (content, weights) in before.items():
            if (record is not None or NAME.encode() in content) and _versions(file.parent) == weights:
                write_whole(file, content)
        raise
    finally:
        state.HF_SAVED_RECORD.reset(token)


def _versions(folder: Path) -> set[tuple[str, int, int]]:
    """Return name, modification time and size of the weight files in a folder."""
    found = [(file.name, file.stat()) for file in folder.glob("*") if file.suffix in (".safetensors", ".bin")]
    return {(name, stat.st_mtime_ns, stat.st_size) for name, stat in found}


def _write_adapter_config(stock: Method, config: Any, /) -> dict[str, Any]:
    """`PeftConfig.to_dict`: adds the record while an adapter is saved."""
    values: dict[str, Any] = stock(config)
    record = state.HF_SAVED_RECORD.get()
    return values if record is None else values | {NAME: dict(record)}


def _read_adapter_config(stock: Method, kind: type, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`PeftConfig.from_json_file`: drops the record, which `_compare` reads from the weights."""
    values: dict[str, Any] = stock(kind, *args, **kwargs)
    values.pop(NAME, None)
    return values


def _announce(file: Path, record: Record) -> None:
    """Add the record to the config of an adapter that is about to be overwritten.

    PEFT writes the weights first. If it fails after that, the folder would hold weights with policies and a config
    without.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # no config that PEFT could load
    if NAME not in config:
        write_whole(file, json.dumps(config | {NAME: dict(record)}, indent=2, sort_keys=True))


def _load_model(stock: Method, kind: type[PreTrainedModel], /, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel.from_pretrained`: returns a model, or a tuple with `output_loading_info=True`."""
    result = stock(kind, *args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    # The first forward pass would apply the model's own scaling before it reaches an attention module.
    replaces = recorded_on_existing(model) == "replace" and is_pending(model)
    # Not for learned policies: `from_pretrained` does not load their values.
    if replaces and not any(map(is_learned, described_policies(model).values())):
        attach(model)
    return result


def _read_config(stock: Method, kind: type[PreTrainedConfig], /, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """`PreTrainedConfig.from_dict`: keeps the implementation that config.json names."""
    return stock(kind, config_dict, **keep_implementation(config_dict, kwargs))


def _load_weights(stock: Method, /, *args: Any, **kwargs: Any) -> Any:
    """`PreTrainedModel._load_pretrained_model`: drops tensors that are read later from the unexpected keys.

    These are the policy descriptions in an adapter and, during `attnscale.hf.load`, all tensors of policies.
    """
    result = stock(*args, **kwargs)
    info, every = loading_info(result), state.HF_READ_LATER.get()
    later = {key for key in info.unexpected_keys if split_name(key)[1] == DESCRIPTION or (every and is_of_policy(key))}
    info.unexpected_keys -= later
    return result


def _load_adapter(stock: Method, model: Any, /, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """`PeftModel.load_adapter`, called by `from_pretrained` and by a resuming Trainer."""
    with _learned_once(model, adapter_name):
        result = stock(model, model_id, adapter_name, *args, **kwargs)
    _compare(model, _stored_tensors(model_id, kwargs), model_id)
    return result


def _load_own_adapter(
    stock: Method,
    model: PreTrainedModel,
    /,
    peft_model_id: Any = None,
    adapter_name: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`PreTrainedModel.load_adapter`, called by `from_pretrained` with a `load_config`."""
    given, loading = kwargs.get("adapter_state_dict"), kwargs.get("load_config")
    path = peft_model_id or getattr(loading, "pretrained_model_name_or_path", None)
    where = {**getattr(loading, "download_kwargs", {}), **(kwargs.get("adapter_kwargs") or {}), **kwargs}
    with _learned_once(model, adapter_name or "default"):
        result = stock(model, peft_model_id, adapter_name, *args, **kwargs)
    _compare(model, _stored_tensors(path, where) if given is None else given, path)
    return result


def _swap_adapter(
    stock: Method, /, model: nn.Module, state_dict: Mapping[str, Tensor], adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    """`peft.utils.hotswap.hotswap_adapter_from_state_dict`, which rejects tensors outside its adapter."""
    policies = {name: value for name, value in state_dict.items() if is_of_policy(name)}
    others = {name: value for name, value in state_dict.items() if name not in policies}
    stock(model, others, adapter_name, *args, **kwargs)
    if policies:
        transformers_model(model).load_state_dict(located(read_adapter(policies)[1], model), strict=False)
        _compare(model, policies, adapter_name)


def _stored_tensors(path: Any, where: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return the policy tensors of a just-loaded adapter, from its folder or the Hub cache."""
    try:
        return StoredFiles(path, {**where, "local_files_only": True}).adapter_tensors()
    except ArgumentError:
        return {}


@contextmanager
def _learned_once(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """Warn if a further adapter replaces the learned values of the policies."""
    others = list(getattr(model, "peft_config", None) or ())
    before = {} if adapter_name in others else {name: value.clone() for name, value in _learned(model).items()}
    yield
    replaced = [name for name, value in _learned(model).items() if name in before and not value.equal(before[name])]
    if replaced and others:
        _warn(
            f"adapter {adapter_name!r} has replaced {replaced[0]}: all adapters share one policy, which now has the "
            "learned values of this adapter"
        )


def _learned(model: nn.Module) -> dict[str, Tensor]:
    """Return the learned values of a model's policies under their state dict names, except offloaded ones."""
    sites = [(path, module) for path, module in model.named_modules() if isinstance(module, Site)]
    named = [(f"{path}.{name}", value) for path, site in sites for name, value in site.state_dict().items()]
    return {name: value for name, value in named if not value.is_meta}


def _compare(model: nn.Module, tensors: Mapping[str, Tensor], path: Any) -> None:
    """Warn if the policies of a model differ from those its loaded adapter was saved with."""
    record, learned = read_adapter(tensors)
    if record is None:
        return
    own = current_record(model)
    if own is None or not _is_same(record, own, model):
        _warn(
            f"the adapter {str(path)!r} was saved with {_name(record)}, but the model has {_name(own)}; its results "
            "differ from those of the saved model. Load both with attnscale.hf.load(path), or, for a model without a "
            "policy, load the adapter's policy with attnscale.hf.load_policy(model, path)"
        )
        return
    missing = set(_learned(transformers_model(model))) - set(located(learned, model))
    if missing:
        _warn(f"the adapter {str(path)!r} lacks {min(missing)}: the learned values of the policy were not loaded")


def _is_same(record: Record, own: Record, model: nn.Module) -> bool:
    """Whether two records describe the same policies for a model."""
    found = []
    for one in (record, own):
        modules = read_modules(one)
        paths = locate_in(model, modules)
        found.append(({paths.get(path, path): entry for path, entry in modules.items()}, one.get(ON_EXISTING)))
    return found[0] == found[1]


def _name(record: Record | None) -> str:
    """Summarise a record for messages: the first policy, the number of modules, and `on_existing`."""
    if record is None:
        return "no policy"
    modules = read_modules(record)
    path, entry = next(iter(modules.items()))
    more = f" and policies at {len(modules) - 1} more modules" if len(modules) > 1 else ""
    existing = f" with on_existing={record[ON_EXISTING]!r}" if ON_EXISTING in record else ""
    return f"{dict(entry)!r} at {path}{more}{existing}"


def _save_state(stock: Method, trained: TrainerState, /, json_path: Any) -> None:
    """`TrainerState.save_to_json`: adds the record."""
    if NAME in vars(trained):
        values = dataclasses.asdict(trained) | {NAME: vars(trained)[NAME]}
        write_whole(json_path, json.dumps(values, indent=2, sort_keys=True) + "\n")
    else:
        stock(trained, json_path)


def _train(stock: Method, trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.train`: reads the Trainer state of a checkpoint before loading the optimizer."""
    token = state.HF_RESUMED_TRAINER.set(trainer if resume_from_checkpoint else None)
    try:
        return stock(trainer, resume_from_checkpoint, *args, **kwargs)
    finally:
        state.HF_RESUMED_TRAINER.reset(token)


def _load_state(stock: Method, kind: type[TrainerState], /, json_path: Any) -> TrainerState:
    """`TrainerState.load_from_json`: removes the record, which the original rejects as unknown."""
    values = json.loads(Path(json_path).read_text(encoding="utf-8"))
    record = values.pop(NAME, None)
    loaded: TrainerState = stock(kind, json_path) if record is None else kind(**values)
    if record is not None:
        setattr(loaded, NAME, record)
    trainer = state.HF_RESUMED_TRAINER.get()
    if trainer is not None:
        state.HF_RESUMED_TRAINER.set(None)  # the Trainer reads the file a second time
        own = current_record(trainer.model)
        # `_compare` has already checked an adapter with policies.
        compared = record is not None and getattr(trainer.model, "peft_config", None)
        if record != own and not compared:
            advice = "call attnscale.hf.apply with the policy of the checkpoint before creating the Trainer"
            if record is None:
                advice = "create the Trainer with a model without a policy to continue this training run"
            _warn(f"training resumes from a checkpoint with {_name(record)}, but the model has {_name(own)}: {advice}")
    return loaded


class RecordInState(TrainerCallback):
    """Default callback of every Trainer: stores the record of the model's policies in the Trainer state."""

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        vars(state).pop(NAME, None)  # from the resumed checkpoint
        record = None if model is None else current_record(model)
        if record is not None:
            setattr(state, NAME, dict(record))


def _warn(message: str) -> None:
    warnings.warn(message, AttnScaleWarning, stacklevel=5)
