"""Load a transformers model together with the policies that were saved with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from attnscale.errors import ArgumentError, reject
from attnscale.hf.patch import Handle, apply
from attnscale.hf.sites import CHILD
from attnscale.optional import need

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> Handle:
    """A model saved by `save_pretrained` while a policy was applied, with the policy and what it has learned.

    The class is the one that was saved unless another is given; further arguments are those of `from_pretrained`. The
    model is `handle.model`.

        handle = attnscale.hf.load("run/checkpoint-1000")
        handle.model.generate(...)
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        reject("path", str(path), "a folder that save_pretrained wrote")
    config = AutoConfig.from_pretrained(folder)
    described = described_in(config)
    if described is None:
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: its config.json has no 'attnscale'; use from_pretrained"
        )
    kind = model_class or getattr(transformers, (config.architectures or ["AutoModel"])[0])
    model: PreTrainedModel = kind.from_pretrained(folder, **arguments)
    handle = apply(model, **(described if "policy" in described else {"policy": described}))
    wanted = [name for name in model.state_dict() if f".{CHILD}." in f".{name}"]
    learned = read_tensors(folder, wanted)
    missing = [name for name in wanted if name not in learned]
    if missing:
        handle.remove()
        raise ArgumentError(f"path={str(path)!r} is not accepted: {missing[0]} is not in its safetensors")
    model.load_state_dict(learned, strict=False)
    return handle


def described_in(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """What `config.attnscale` says, of the config itself or of the part of it that reads text."""
    given = getattr(config, "attnscale", None)
    if given is None and config.sub_configs:
        given = getattr(config.get_text_config(), "attnscale", None)
    return given if isinstance(given, Mapping) else None


def read_tensors(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Those of the tensors that a folder's safetensors hold, in one file or several."""
    if not names:
        return {}
    index = folder / _INDEX
    files = json.loads(index.read_text())["weight_map"] if index.is_file() else dict.fromkeys(names, _SINGLE)
    safe_open = need("safetensors", "attnscale.hf.load", "hf").safe_open
    found: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names if name in files}):
        with safe_open(folder / file, framework="pt") as tensors:
            present = set(tensors.keys())
            found |= {name: tensors.get_tensor(name) for name in names if name in present}
    return found
