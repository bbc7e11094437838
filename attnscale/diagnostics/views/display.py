"""Names, units, scales, colours and explanations of all quantities.

Used by the HTML page, the terminal, plots, TensorBoard and the README.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from attnscale.diagnostics.records.record import Record, layers_of

# Nine samples of viridis, dark for low values; readable in greyscale.
COLOURS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
RGB = tuple(tuple(bytes.fromhex(colour[1:])) for colour in COLOURS)
MISSING = (225, 225, 225)  # NaN, or a head index that the layer does not have


class Quantity(NamedTuple):
    """A quantity of a record: per row (phase "forward" or "backward"), or a scalar per head (empty phase).

    Statistics measured in both passes have the phase "forward".
    """

    name: str
    phase: str
    title: str  # for a column or a small plot
    label: str  # for a list or an axis, with the unit
    explanation: str
    low: float | None = None  # ends of the scale, if fixed
    high: float | None = None
    log: bool = False
    statistic: str = "mean"  # over the rows of a head, where one number is shown

    @property
    def is_share(self) -> bool:
        """Whether the scale is fixed at both ends, as for a value in [0, 1]."""
        return self.low is not None and self.high is not None

    def of(self, record: Record, statistic: str | None = None) -> float | None:
        """Return the value in a record, None if it was not recorded."""
        return record.value(self.phase, self.name, statistic or self.statistic)


GAP_COUNT = "gap_count_"  # followed by the gap t

# In display order; N(t) comes last.
_ROWS = (
    Quantity("w_max", "forward", "w_max", "largest weight w_max", "1 if one key has all the weight", 0.0, 1.0),
    Quantity("relative_entropy", "forward", "H / ln n", "entropy / ln n", "1 if all weights are equal", 0.0, 1.0),
    Quantity("entropy", "forward", "entropy, nats", "entropy H, nats", "entropy of the weights, after temperature"),
    Quantity("max_logit", "forward", "max logit", "largest logit", "in nats, after temperature", statistic="max"),
    Quantity("criticality", "forward", "criticality r", "criticality r = β/Λ", "above 1 the best key wins", log=True),
    Quantity(
        "criticality_rest",
        "forward",
        "r without sink",
        "criticality without the first 4 keys",
        "of the keys that compete beside a sink; 16 rows per call",
        log=True,
    ),
    Quantity("accumulation", "forward", "Λ", "accumulation Λ", "sup ln N(t)/t: high if many keys are near the best"),
    Quantity("prominence", "forward", "prominence", "prominence of the best score", "about 1 if the scores are noise"),
    Quantity(
        "first_share",
        "forward",
        "first keys",
        "weight on the first 4 keys",
        "high in a head with an attention sink",
        0.0,
        1.0,
    ),
    Quantity(
        "winner", "forward", "winner", "index of the winning key", "0 if the first visible key has the largest weight"
    ),
    Quantity("beta", "forward", "β", "temperature β", "factor on the logits, set by the policy"),
    Quantity("visible", "forward", "n", "visible keys n", "number of keys the row can attend to"),
    Quantity("score_gradient", "backward", "|dS|", "row norm of dS", "gradient of a row's raw scores", log=True),
    Quantity("beta_gradient", "backward", "dβ", "gradient of β", "gradient of the loss with respect to a row's β"),
    Quantity("gain", "", "gain", "gain ‖(dQ, dK, dV)‖ / ‖dO‖", "ratio of input to output gradient", log=True),
    Quantity("score_gain", "", "score gain", "score gain ‖(dQ, dK)‖ / ‖dO‖", "0 if scores get no gradient", log=True),
    Quantity("token_angle", "", "token angle", "token angle, 1 − cosine", "0 if all tokens have the same value", 0.0),
    Quantity("value_size", "", "value size", "RMS of the values", "0 if the values are dead", log=True),
    Quantity("angle_ratio", "", "angle ratio", "angle ratio, out / in", "0 if all output rows are parallel", 0.0),
    Quantity("mismatch", "", "mismatch", "forward/backward mismatch", "largest difference in a row statistic"),
    Quantity("query_gradient", "", "‖dQ‖", "‖dQ‖", "gradient of the queries"),
    Quantity("key_gradient", "", "‖dK‖", "‖dK‖", "gradient of the keys; divided equally among grouped heads"),
    Quantity("value_gradient", "", "‖dV‖", "‖dV‖", "gradient of the values; divided equally among grouped heads"),
    Quantity("output_gradient", "", "‖dO‖", "‖dO‖", "gradient of the output"),
    Quantity("broken_row", "", "broken row", "first broken row", "first row with NaN or infinity, if any"),
    Quantity("broken_step", "", "broken step", "step of the first NaN", "first step with NaN or infinity, if any"),
    Quantity("broken_call", "", "broken call", "first broken call", "number of passes of the step before NaN, if any"),
    Quantity("broken_origin", "", "broken origin", "origin of NaN", "bits: query, key, value, scores, dO, gradients"),
    Quantity("skipped_calls", "", "skipped", "skipped calls", "number of calls that could not be measured, if any"),
)
QUANTITIES = {row.name: row for row in _ROWS}

# Quantities of compact reports and tables, in this order.
MAIN = tuple(
    QUANTITIES[name]
    for name in ("w_max", "relative_entropy", "max_logit", "criticality", "first_share", "token_angle", "score_gain")
)
# Quantities of the terminal view, most important first, and their reduction over heads. Extremes reveal a bad head.
WATCHED = {"max_logit": "largest", "relative_entropy": "mean", "gain": "least", "w_max": "mean"}


def quantity_of(name: str, phase: str = "forward") -> Quantity:
    """Return the quantity of a name. An unknown name is used as its own label.

    >>> [quantity_of(name).label for name in ("w_max", "gap_count_0.5", "mine")]
    ['largest weight w_max', 'N(0.5), keys within 0.5 of the best', 'mine']
    """
    if name.startswith(GAP_COUNT):
        gap = name.removeprefix(GAP_COUNT)
        label = f"N({gap}), keys within {gap} of the best"
        return Quantity(name, phase, f"N({gap}), keys near the best", label, "counted on raw scores")
    return QUANTITIES.get(name) or Quantity(name, phase, name, name, "")


def place_on_scale(x: float, low: float, high: float, log: bool) -> float:
    """Map a value to its position on a scale, 0 to 1. NaN stays NaN."""
    if math.isnan(x):
        return math.nan
    if x <= low or x >= high:  # infinities and values without a logarithm lie at the ends
        return 0.5 if x == low == high else float(x > low)
    return math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)


class Grid(NamedTuple):
    """One quantity over layers × heads; NaN if missing."""

    quantity: Quantity
    layers: list[str]
    values: list[list[float]]

    def scale(self) -> tuple[float, float]:
        """Return the ends of the colour scale: fixed, or the smallest and largest value that can be shown."""
        shown = [x for row in self.values for x in row if math.isfinite(x) and (x > 0 or not self.quantity.log)]
        low = self.quantity.low if self.quantity.low is not None else min(shown, default=0.0)
        high = self.quantity.high if self.quantity.high is not None else max(shown, default=low)
        return low, max(high, low)

    def shares(self) -> list[list[float]]:
        """Return the values as positions on the scale, 0 to 1. NaN stays NaN."""
        low, high = self.scale()
        return [[place_on_scale(x, low, high, self.quantity.log) for x in row] for row in self.values]


def grid_of(records: Sequence[Record], quantity: Quantity) -> Grid | None:
    """Return a quantity over layers × heads, padded with NaN to the largest number of heads; None if not recorded."""
    layers = layers_of(records)
    known = {(r.layer, r.head): x for r in records if (x := quantity.of(r)) is not None}
    if not known:
        return None
    heads = 1 + max(record.head for record in records)
    values = [[known.get((layer, head), math.nan) for head in range(heads)] for layer in layers]
    return Grid(quantity, layers, values)


def main_grids(records: Sequence[Record]) -> list[Grid]:
    """Return the grids of all recorded main quantities."""
    return [grid for quantity in MAIN if (grid := grid_of(records, quantity)) is not None]


def colour(share: float) -> tuple[int, int, int]:
    """Return the colour of a position on the scale, 0 to 1.

    >>> colour(0.0), colour(1.0), colour(float("nan"))
    ((68, 1, 84), (253, 231, 37), (225, 225, 225))
    """
    if math.isnan(share):
        return MISSING
    place = min(max(share, 0.0), 1.0) * (len(RGB) - 1)
    index = min(int(place), len(RGB) - 2)
    part = place - index
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(RGB[index], RGB[index + 1], strict=True))
    return red, green, blue


def short_names(layers: Sequence[str]) -> list[str]:
    """Strip the common prefix and suffix of module paths. A number keeps the word before it.

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
