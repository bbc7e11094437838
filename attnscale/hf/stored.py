"""Files of a folder or of a repository on the HuggingFace Hub, and the learned tensors in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils.hub import cached_file

from attnscale._util.optional import need
from attnscale.errors import ArgumentError
from attnscale.hf.sites import CHILD

# Arguments of `from_pretrained` that say where a repository and its files are.
_WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

_MARK = f".{CHILD}."


@dataclass(frozen=True)
class Stored:
    """A folder, or a repository by its id; files of the latter come from the cache or are downloaded."""

    path: str
    where: Mapping[str, Any] = field(default_factory=dict)

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
        """What a JSON file holds; None where there is none."""
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


def stored(path: str | Path, arguments: Mapping[str, Any]) -> Stored:
    """The place that `from_pretrained` would load from, given its arguments."""
    return Stored(str(path), {key: arguments[key] for key in _WHERE if key in arguments})


def is_of_policy(name: str) -> bool:
    """Whether a name of a tensor is one of a site of ours."""
    return _MARK in f".{name}"


def split(name: str) -> tuple[str, str]:
    """The path of the attention, and what follows the name of the site.

    >>> split("model.layers.0.self_attn.attnscale.policy.s")
    ('model.layers.0.self_attn', 'policy.s')
    """
    path, _, rest = f".{name}".rpartition(_MARK)
    return path[1:], rest
