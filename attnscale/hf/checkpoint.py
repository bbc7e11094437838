"""Load a transformers model together with the policies that were saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from attnscale.errors import ArgumentError, reject
from attnscale.hf.attach import described_policies, install_described
from attnscale.hf.configs import NAME, configs_of
from attnscale.hf.handle import Handle
from attnscale.hf.loading import policies_expected
from attnscale.hf.stored import Stored, is_of_policy, stored

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def load(path: str | Path, *, model_class: type[PreTrainedModel] | None = None, **arguments: Any) -> Handle:
    """A model saved by `save_pretrained` while a policy was applied, with the policy and what it has learned.

    The path is a folder or the id of a repository on the HuggingFace Hub. The class is the one that was saved unless
    another is given; further arguments are those of `from_pretrained`. The model is `handle.model`.

        handle = attnscale.hf.load("run/checkpoint-1000")
        handle.model.generate(...)
    """
    place = stored(path, arguments)
    plain = place.json(CONFIG)
    if plain is None:
        reject("path", str(path), "a folder that save_pretrained wrote, or the id of such a repository on the Hub")
    described = described_in_json(plain)
    if described is None:
        raise ArgumentError(
            f"path={str(path)!r} is not accepted: its config.json has no 'attnscale'; use from_pretrained"
        )
    kind = model_class or getattr(transformers, (plain.get("architectures") or ["AutoModel"])[0], None)
    if kind is None:
        reject("model_class", None, f"the class of the model, {plain['architectures'][0]}: transformers has none")
    if arguments.get("attn_implementation") == NAME:
        arguments = {key: value for key, value in arguments.items() if key != "attn_implementation"}
    # None: what transformers would choose. The policies come afterwards, with what they have learned.
    with policies_expected(kind, plain):
        model: PreTrainedModel = kind.from_pretrained(path, **{"attn_implementation": None} | arguments)
    for config in configs_of(model):
        config.__dict__.pop(NAME, None)
    handle = install_described(model, described_policies(model, described), described)
    try:
        load_learned(model, read_learned(place, model), str(path))
    except BaseException:
        handle.remove()
        raise
    return handle


def described_in_json(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What 'attnscale' says in the plain data of a config, or else in that of a part of it."""
    given = config.get(NAME)
    if isinstance(given, Mapping):
        return given
    parts = (described_in_json(part) for part in config.values() if isinstance(part, Mapping))
    return next((part for part in parts if part is not None), None)


def load_learned(model: PreTrainedModel, learned: Mapping[str, Tensor], path: str) -> None:
    """Put what policies have learned into a model that has them; all of it must be there."""
    wanted = [name for name in model.state_dict() if is_of_policy(name)]
    missing = [name for name in wanted if name not in learned]
    if missing:
        raise ArgumentError(f"path={path!r} is not accepted: {missing[0]} is not in its safetensors")
    model.load_state_dict({name: learned[name] for name in wanted}, strict=False)


def read_learned(place: Stored, model: PreTrainedModel) -> dict[str, Tensor]:
    """What a model's safetensors hold of policies, in one file or several, under the names that the model has for it.

    `save_pretrained` writes the names of the original checkpoint where a type has others, as `from_pretrained` reads
    them: nomic_bert.layers.0 is encoder.layers.0 in the file.
    """
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    state = model.state_dict()
    found: dict[str, Tensor] = {}
    for name, value in place.tensors(WEIGHTS).items() if any(map(is_of_policy, state)) else ():
        renamed = rename_source_key(name, renamings, [], model.base_model_prefix, state)[0]
        found[name if name in state else renamed] = value
    return found
