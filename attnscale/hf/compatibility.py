"""What differs between the supported releases of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import transformers
from torch import nn

from attnscale._util.versions import release
from attnscale.policies.record import NAME

_IMPLEMENTATION = "attn_implementation"

# Before 5.4, `PreTrainedConfig.from_dict` replaces the implementation of config.json by that of its caller, or None.
DROPS_IMPLEMENTATION: Final = release(transformers.__version__) < release("5.4")


def keep_implementation(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `given` to `PreTrainedConfig.from_dict`, with the implementation of config.json added.

    Only for the implementation "attnscale", alone or for a part of the model: others stay as transformers treats them.
    """
    saved = values.get(_IMPLEMENTATION)
    return {_IMPLEMENTATION: saved, **given} if _names_attnscale(saved) else dict(given)


def _names_attnscale(saved: Any) -> bool:
    return any(map(_names_attnscale, saved.values())) if isinstance(saved, Mapping) else saved == NAME


def why_fixed(module: nn.Module) -> str | None:
    """Return why the scaling of a Ministral 3 attention module cannot be disabled, or None.

    Before 5.4 it depends on `cache_position`, which a static cache also uses to store the keys.
    """
    if "position_ids" in inspect.signature(module.forward).parameters:
        return None
    return f"disabling it requires transformers 5.4 or newer, and {transformers.__version__} is installed"


def loading_info(result: Any) -> Any:
    """Return the loading info in the result of `PreTrainedModel._load_pretrained_model`.

    The result is the info in 5.0, and a tuple of the info and the index of offloaded weights since 5.1.
    """
    return result[0] if isinstance(result, tuple) else result
