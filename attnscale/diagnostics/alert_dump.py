"""Writes the rows behind an alert to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from attnscale.diagnostics.records.record import Alert
from attnscale.errors import MissingDependencyError


def dump_rows(folder: Path, alert: Alert, captured: Mapping[str, Tensor]) -> Path | None:
    """Write the sampled query rows of the head and the key rows at their slots as safetensors; None if there are none.

    The name of the file holds step, layer, head and kind; its metadata holds the whole alert.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependencyError("dumps need safetensors: pip install 'attnscale[hf]'") from error
    if not captured:
        return None
    query, key = captured["query"], captured["key"]
    group = query.shape[1] // key.shape[1]
    rows = {
        "rows": captured["rows"].cpu().contiguous(),
        "query": query[:, alert.head].cpu().contiguous(),  # [B, R, D]
        "key": key[:, alert.head // group].cpu().contiguous(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step{alert.step}-{alert.layer}-head{alert.head}-{alert.kind}.safetensors"
    partial = path.with_suffix(".partial")
    save_file(rows, partial, metadata={name: str(value) for name, value in alert.as_dict().items()})
    partial.replace(path)
    return path
