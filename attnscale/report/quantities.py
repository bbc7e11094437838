"""What the quantities of a record are called on a page."""

from __future__ import annotations

LABELS = {
    "w_max": "largest weight w_max",
    "relative_entropy": "entropy / ln n",
    "entropy": "entropy H, nats",
    "max_logit": "largest logit",
    "criticality": "criticality r = β/Λ",
    "accumulation": "accumulation Λ",
    "prominence": "prominence of the best score",
    "beta": "temperature β",
    "visible": "visible keys n",
    "score_gradient": "row norm of dS",
    "beta_gradient": "gradient of β",
    "gain": "gain ‖(dQ, dK, dV)‖ / ‖dO‖",
    "angle_ratio": "angle ratio, out / in",
    "mismatch": "forward/backward mismatch",
    "query_gradient": "‖dQ‖",
    "key_gradient": "‖dK‖",
    "value_gradient": "‖dV‖",
    "output_gradient": "‖dO‖",
    "broken_row": "first broken row",
}


def label(name: str) -> str:
    """A name for people; one that is not known stays as it is.

    >>> label("w_max"), label("gap_count_0.5"), label("mine")
    ('largest weight w_max', 'N(0.5), keys within 0.5 of the best', 'mine')
    """
    if name.startswith("gap_count_"):
        threshold = name.removeprefix("gap_count_")
        return f"N({threshold}), keys within {threshold} of the best"
    return LABELS.get(name, name)


def order(name: str) -> int:
    """Where a quantity stands in a list."""
    names = list(LABELS)
    return names.index(name) if name in names else len(names)
