"""Files that hold policies: a folder or Hub repository to read from, and what `handle.save` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from attnscale._util.files import write_whole
from attnscale._util.optional import need
from attnscale.errors import ArgumentError
from attnscale.hf.sites import NAME
from attnscale.policies import Policy

POLICY_CONFIG = "attnscale_config.json"
POLICY_WEIGHTS = "attnscale_policy.safetensors"
MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED_ADAPTER_WEIGHTS = "adapter_model.bin"

# Arguments of `from_pretrained` that say where a repository and its files are.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

_MARK = f".{NAME}."


def save_policies(folder: str | Path, policies: Mapping[str, Policy], record: Mapping[str, Any]) -> None:
    """Write policies, by their paths in the transformers model: a record, and a file with the learned values if any."""
    folder = Path(folder)
    learned: dict[str, Tensor] = {}
    for path, policy in policies.items():
        for name, value in policy.state_dict().items() if isinstance(policy, nn.Module) else ():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # of a sharded one, all of it
            learned[f"{path}{_MARK}policy.{name}"] = whole.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    if learned:
        save = need("safetensors.torch", "handle.save", "hf").save
        write_whole(folder / POLICY_WEIGHTS, save(learned, metadata={"format": "pt"}))
    write_whole(folder / POLICY_CONFIG, json.dumps(record, indent=2, sort_keys=True) + "\n")
    if not learned:
        (folder / POLICY_WEIGHTS).unlink(missing_ok=True)  # of policies that were saved here before


class StoredFiles:
    """A folder, or a repository on the Hub by its id, that `from_pretrained` would load from, given its arguments."""

    def __init__(self, path: str | Path, arguments: Mapping[str, Any]) -> None:
        self.path = str(path)
        self.where = {key: arguments[key] for key in _WHERE if key in arguments}

    def file(self, name: str) -> Path | None:
        """A file by its name; None where there is none."""
        try:
            found = cached_file(self.path, name, **self.where, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"path={self.path!r} is not accepted: expected a folder, or the id of a repository on the Hub "
                f"({str(error).splitlines()[0]})"
            ) from error
        return None if found is None else Path(found)

    def json(self, name: str) -> dict[str, Any] | None:
        """The content of a JSON file; None where there is none."""
        file = self.file(name)
        return None if file is None else json.loads(file.read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of policies in a safetensors file, or in all the parts that its index names."""
        index = self.json(f"{name}.index.json")
        parts = {name} if index is None else {part for key, part in index["weight_map"].items() if is_of_policy(key)}
        safe_open = need("safetensors", "attnscale.hf.load", "hf").safe_open
        found: dict[str, Tensor] = {}
        for file in filter(None, map(self.file, sorted(parts))):
            with safe_open(file, framework="pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if is_of_policy(key)}  # noqa: SIM118
        return found

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The tensors of policies in an adapter, in either of the formats that PEFT writes."""
        found = self.tensors(_ADAPTER_WEIGHTS)
        file = None if found else self.file(_PICKLED_ADAPTER_WEIGHTS)
        pickled = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
        return found | {key: value for key, value in pickled.items() if is_of_policy(key)}


def is_of_policy(name: str) -> bool:
    """Whether a tensor of this name belongs to a site."""
    return _MARK in f".{name}"


def split_name(name: str) -> tuple[str, str]:
    """The path of the attention module, and what follows the name of its site.

    >>> split_name("model.layers.0.self_attn.attnscale.policy.s")
    ('model.layers.0.self_attn', 'policy.s')
    """
    path, _, rest = f".{name}".rpartition(_MARK)
    return path[1:], rest
