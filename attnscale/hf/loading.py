"""Load a checkpoint that holds policies without transformers' report calling them unexpected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers import PreTrainedConfig, PreTrainedModel

from attnscale.hf.sites import CHILD

# Keys of a checkpoint such as "model.layers.0.self_attn.attnscale.policy.s".
POLICY_KEYS = rf"(^|\.){CHILD}\."

_IGNORED = "_keys_to_ignore_on_load_unexpected"
_INHERITED = object()


@contextlib.contextmanager
def policies_expected(kind: type, config: PreTrainedConfig) -> Iterator[None]:
    """While the block runs, models of a class, or of what an auto class makes of a config, expect policies in a file.

    They are read from it afterwards, once the model has the modules that they belong to.
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


def _model_class(kind: type, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that `kind.from_pretrained` builds; None where that is not known beforehand."""
    if issubclass(kind, PreTrainedModel):
        return kind
    mapped = getattr(kind, "_model_mapping", {}).get(type(config), None)
    named = {model.__name__: model for model in (mapped if isinstance(mapped, tuple) else (mapped,)) if model}
    chosen = next((named[name] for name in config.architectures or () if name in named), None)
    found = chosen or next(iter(named.values()), None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None
