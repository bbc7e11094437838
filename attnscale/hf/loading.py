"""Load a checkpoint that holds policies without transformers' report calling them unexpected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel

from attnscale.hf.sites import CHILD

# Keys of a checkpoint such as "model.layers.0.self_attn.attnscale.policy.s".
POLICY_KEYS = rf"(^|\.){CHILD}\."

_IGNORED = "_keys_to_ignore_on_load_unexpected"
_INHERITED = object()


@contextlib.contextmanager
def policies_expected(kind: type, config: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, a model class expects policies in a file; they are read from it once the model has them.

    For an auto class it is the class that it builds for a config, given as the plain data of config.json.
    """
    model_class = _model_class(kind, config)
    if model_class is None:
        yield
        return
    own = vars(model_class).get(_IGNORED, _INHERITED)
    setattr(model_class, _IGNORED, {*(getattr(model_class, _IGNORED, None) or ()), POLICY_KEYS})
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(model_class, _IGNORED)
        else:
            setattr(model_class, _IGNORED, own)


def _model_class(kind: type, config: Mapping[str, Any]) -> type[PreTrainedModel] | None:
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
