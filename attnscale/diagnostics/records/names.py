"""Short names for layers."""

from __future__ import annotations

from collections.abc import Sequence


def short_names(layers: Sequence[str]) -> list[str]:
    """Paths without what all of them begin and end with; a number keeps the word before it.

    >>> short_names(["model.layers.0.attn", "model.layers.1.attn"])
    ['layers.0', 'layers.1']
    >>> short_names(["encoder.0.attn", "decoder.0.attn"]), short_names(["attn"])
    (['encoder', 'decoder'], ['attn'])
    """
    if len(set(layers)) < 2:
        return list(layers)
    parts = [layer.split(".") for layer in layers]
    start = 0
    while all(len(part) > start + 1 and part[start] == parts[0][start] for part in parts):
        start += 1
    while all(len(part) > start + 1 and part[-1] == parts[0][-1] for part in parts):
        parts = [part[:-1] for part in parts]
    if start and any(part[start].isdecimal() for part in parts):
        start -= 1
    return [".".join(part[start:]) for part in parts]
