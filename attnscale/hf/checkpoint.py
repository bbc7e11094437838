"""Load a transformers model together with the policies that were saved with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from attnscale.errors import ArgumentError, reject
from attnscale.hf.loading import policies_expected
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
    with policies_expected(kind, config):
        model: PreTrainedModel = kind.from_pretrained(folder, **arguments)
    handle = apply(model, **(described if "policy" in described else {"policy": described}))
    wanted = [name for name in model.state_dict() if f".{CHILD}." in f".{name}"]
    learned = read_learned(folder, model) if wanted else {}
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


def read_learned(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """What a folder's safetensors hold of policies, in one file or several, under the names that the model has for it.

    `save_pretrained` writes the names of the original checkpoint where a type has others, as `from_pretrained` reads
    them: nomic_bert.layers.0 is encoder.layers.0 in the file.
    """
    index = folder / _INDEX
    stored = json.loads(index.read_text())["weight_map"] if index.is_file() else {CHILD: _SINGLE}
    safe_open = need("safetensors", "attnscale.hf.load", "hf").safe_open
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for file in sorted({file for name, file in stored.items() if CHILD in name}):
        with safe_open(folder / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                if f".{CHILD}." in f".{name}":
                    renamed = rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]
                    found[name if name in state else renamed] = tensors.get_tensor(name)
    return found
