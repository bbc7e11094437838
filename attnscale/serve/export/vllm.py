"""`--to vllm`: the same checkpoint under an architecture name that vLLM knows only with the plugin of attnscale.

vLLM ignores unknown entries of a config, and would serve the unchanged checkpoint at β = 1 where attnscale is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from attnscale._util.files import write_whole
from attnscale.hf import Handle, load
from attnscale.policies.record import ARCHITECTURE_PREFIX
from attnscale.serve.tables import check_has_table

DTYPE = None
CHECKED_DTYPE = None
CHECKED_LENGTHS = (512,)

_CONFIG = "config.json"


def plan(handle: Handle, path: str, tokenizer: Path | None) -> None:
    """Raise if a policy is not a function of length and position."""
    for layer, policy in handle.policies.items():
        check_has_table(policy, layer)


def write(handle: Handle, _: None, folder: Path) -> None:
    """Write the model with `save_pretrained`, then rename its architecture."""
    model: Any = handle.model
    model.save_pretrained(folder)
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    config["architectures"] = [f"{ARCHITECTURE_PREFIX}{type(model).__name__}"]
    write_whole(folder / _CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def read(handle: Handle, _: None, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the logits of the written model, loaded with `attnscale.hf.load`."""
    model: Any = load(folder).model
    model.eval()
    return lambda tokens: model(tokens, use_cache=False).logits
