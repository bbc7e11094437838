"""Policies in files of their own, without the model: written by a handle, or by PEFT among its adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.errors import ArgumentError
from attnscale.hf.attach import described_policies, install_described
from attnscale.hf.checkpoint import CONFIG, described_in_json, load_learned, read_learned
from attnscale.hf.configs import NAME
from attnscale.hf.handle import Handle
from attnscale.hf.install import path_of_transformers_model
from attnscale.hf.record import DESCRIPTION, MODULES, locate
from attnscale.hf.stored import Stored, is_of_policy, split, stored
from attnscale.hf.survey import survey, transformers_model

POLICY_CONFIG = "attnscale_config.json"
POLICY_WEIGHTS = "attnscale_policy.safetensors"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"

# How PEFT holds a model: in a tuner, or by itself where the method only adds to the inputs.
_IN_TUNER, _IN_WRAPPER = "base_model.model.", "base_model."


def save_policy(handle: Handle, folder: str | Path) -> None:
    """Write the policies of a handle: which modules have which, and a file with what they have learned, if anything."""
    folder = Path(folder)
    prefix = path_of_transformers_model(handle.model)
    learned = {
        f"{path.removeprefix(prefix)}.{NAME}.policy.{name}": _whole(value)
        for path, policy in handle.policies.items()
        if isinstance(policy, nn.Module)
        for name, value in policy.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    if learned:
        save = need("safetensors.torch", "handle.save", "hf").save
        write_whole(folder / POLICY_WEIGHTS, save(learned, metadata={"format": "pt"}))
    write_whole(folder / POLICY_CONFIG, json.dumps(handle.record, indent=2, sort_keys=True) + "\n")
    if not learned:
        (folder / POLICY_WEIGHTS).unlink(missing_ok=True)  # of policies that were saved here before


def load_policy(model: nn.Module, path: str | Path, **arguments: Any) -> Handle:
    """Give a model the policies that a folder or a repository on the HuggingFace Hub holds, and what they have learned.

    The folder is one that `handle.save` wrote; or an adapter that PEFT saved while a policy that learns was applied; or
    a whole model's checkpoint. `arguments` say where a repository is, as for `from_pretrained`: `revision`, `token`,
    `cache_dir`, `subfolder`.

        model = peft.PeftModel.from_pretrained(model, "run/adapter")
        handle = attnscale.hf.load_policy(model, "run/adapter")
    """
    place, inner = stored(path, arguments), transformers_model(model)
    record, learned = _own(place) or _of_adapter(place) or _of_model(place)
    handle = install_described(model, described_policies(model, record), record)
    try:
        if learned is None:
            learned = read_learned(place, inner)
        load_learned(inner, _named_as_in(model, learned), str(path))
    except BaseException:
        handle.remove()
        raise
    return handle


_Found = tuple[Mapping[str, Any], dict[str, Tensor] | None]


def _own(place: Stored) -> _Found | None:
    """What `save_policy` wrote."""
    record = place.json(POLICY_CONFIG)
    return None if record is None else (record, place.tensors(POLICY_WEIGHTS))


def _of_adapter(place: Stored) -> _Found | None:
    """What PEFT wrote of sites that learn: parameters, and beside them which policy they belong to."""
    found = place.tensors(_ADAPTER_WEIGHTS)
    tensors = {name.removeprefix(_IN_TUNER).removeprefix(_IN_WRAPPER): value for name, value in found.items()}
    parts = {name: split(name) for name in tensors}
    modules = {
        path: json.loads(bytes(tensors[name].tolist())) for name, (path, rest) in parts.items() if rest == DESCRIPTION
    }
    learned = {name: value for name, value in tensors.items() if parts[name][1] != DESCRIPTION}
    return ({MODULES: modules}, learned) if modules else None


def _of_model(place: Stored) -> _Found:
    """What `save_pretrained` wrote of a model with policies."""
    record = described_in_json(place.json(CONFIG) or {})
    if record is None:
        raise ArgumentError(
            f"path={place.path!r} is not accepted: it has neither {POLICY_CONFIG}, nor an adapter with a policy that "
            f"learns, nor a {CONFIG} with 'attnscale'"
        )
    return record, None


def _named_as_in(model: nn.Module, learned: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of policies under the names that they have in the transformers model itself."""
    inner, prefix = transformers_model(model), path_of_transformers_model(model)
    present = [layer.path.removeprefix(prefix) for layer in survey(model) if layer.routed]
    parts = {name: split(name) for name in learned if is_of_policy(name)}
    there = locate((path for path, _ in parts.values()), present, inner.base_model_prefix)
    return {f"{there[path]}.{NAME}.{rest}": learned[name] for name, (path, rest) in parts.items() if path in there}


def _whole(value: Tensor) -> Tensor:
    """A tensor on the CPU; of one that is sharded, all of it."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().cpu().contiguous()
