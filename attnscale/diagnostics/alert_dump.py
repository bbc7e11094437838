"""The rows behind an alert, on disk for a later look."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from attnscale.diagnostics.records.record import Alert
from attnscale.errors import MissingDependencyError


def dump_rows(folder: Path, alert: Alert, captured: Mapping[str, Tensor]) -> Path | None:
    """Write the sampled query rows of the head and the key rows at their slots as safetensors; None if there are none.

    The file is named after step, layer, head and kind, and says the same, with value and limit, in its metadata.
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
