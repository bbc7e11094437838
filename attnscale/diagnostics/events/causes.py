"""Causes of events: the rule of each, its message and what to try; and the limits of the rules.

A new cause is a rule in `rules`, and here a row of `CAUSES`, with a limit if it needs one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from attnscale._util.checks import read_int, read_number
from attnscale._util.files import read_yaml
from attnscale.diagnostics.events import rules
from attnscale.diagnostics.events.rules import Place, Report, Symptom
from attnscale.errors import ArgumentError, reject, reject_type


@dataclass(frozen=True)
class Thresholds:
    """Limits of the rules. None disables the events of a limit.

    Args:
        exploding: limit on the largest logit of a head that has at least doubled since the start of the run.
        jump: limit on a change of ln(max logit) between reports, in units of the head's usual change.
        collapsed: limit on the median of the largest weight. An event needs a quarter of all heads.
        diffuse: limit on entropy / ln n of a head that was focused before, or that stays uniform while others focus.
        dead: smallest ratio of output and of output gradient to their usual size.
        vanishing: limit on ‖(dQ, dK)‖ / ‖dO‖.
        rank: limit on the token angle, 1 − cosine between tokens, in the deep layers.
        temperature: smallest median of β in a model whose heads all attend uniformly.
        mismatch: limit on the difference between forward and backward statistics of a row.
        seen: number of reports that must show a lasting problem, of the last `window`.
        window: see `seen`.
        steps: number of steps that a lasting problem must last.
        quiet: number of reports without the problem after which an event is over.

    Raises:
        ArgumentError: a limit is negative or NaN, or `seen` exceeds `window`.
        ArgumentTypeError: a limit is not a number.

    Example:
        >>> limits = Thresholds(exploding=50.0, diffuse=None)
        >>> limits.exploding, limits.diffuse, limits.collapsed
        (50.0, None, 0.95)
    """

    exploding: float | None = 100.0
    jump: float | None = 6.0
    collapsed: float | None = 0.95
    diffuse: float | None = 0.98
    dead: float | None = 1e-3
    vanishing: float | None = 1e-5
    rank: float | None = 1e-3
    temperature: float | None = 0.3
    mismatch: float | None = 1e-2
    seen: int = 2
    window: int = 3
    steps: int = 10
    quiet: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if name in ("seen", "window", "steps", "quiet"):
                object.__setattr__(self, name, read_int(name, value, "an int >= 1", least=1))
            elif value is not None:
                if isinstance(value, bool):
                    reject_type(name, value, "a number >= 0 or None")
                limit = read_number(name, value, "a number >= 0 or None")
                if not limit >= 0:
                    reject(name, value, "a number >= 0 or None")
                object.__setattr__(self, name, limit)
        if self.seen > self.window:
            reject("seen", self.seen, f"at most window={self.window}")

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        """Read thresholds from a YAML file. Missing keys keep their defaults.

        Raises:
            ArgumentError: the file does not exist, or contains an unknown key or an invalid value.
        """
        content = read_yaml(Path(path))
        known = [field.name for field in fields(cls)]
        for key in content:
            if key not in known:
                raise ArgumentError(f"key {key!r} in {path} is not accepted: expected {', '.join(known)}")
        return cls(**content)


class Cause(NamedTuple):
    """A kind of event."""

    rule: Callable[[Report, float], dict[Place, Symptom]]
    limit: str | None  # field of `Thresholds`: second argument of the rule, and None there disables the cause
    title: str
    quantity: str  # shows the problem
    text: str  # format string of the message: value, usual, times, size
    advice: str
    explains: tuple[str, ...] = ()  # consequences that raise no event of their own
    sudden: bool = False  # one report is enough
    critical: bool = False


_SHARP = ("collapse", "exploding", "logit_drop", "rank_collapse", "vanishing", "diffuse", "dead_output", "dead_values")
# In order of precedence: the first cause of a report takes its consequences.
CAUSES: dict[str, Cause] = {
    "nan": Cause(
        rules.broken,
        None,
        "NaN or infinity",
        "broken_row",
        "NaN or infinity",
        "Stop, restore the last checkpoint and inspect this layer; Monitor(dump=...) writes its queries and keys.",
        ("temperature", "divergence", "logit_jump", *_SHARP, "mismatch"),
        sudden=True,
        critical=True,
    ),
    "temperature": Cause(
        rules.wrong_temperature,
        "temperature",
        "wrong temperature",
        "beta",
        "the temperature β = {value:.3g} is far too {size}",
        "Use a policy with β near 1 at the training length: an anchored law, or another gamma.",
        ("divergence", "logit_jump", *_SHARP),
        critical=True,
    ),
    "divergence": Cause(
        rules.diverging,
        "collapsed",
        "entropy collapse of a diverging model",
        "relative_entropy",
        "entropy fell from {usual:.2f} to {value:.2f} of ln n while logits and values grew",
        "Lower the learning rate or lengthen the warm-up, and go back to a checkpoint before this step.",
        ("logit_jump", *_SHARP),
        sudden=True,
        critical=True,
    ),
    "collapse": Cause(
        rules.collapsed,
        "collapsed",
        "entropy collapse",
        "relative_entropy",
        "entropy fell from {usual:.2f} to {value:.2f} of ln n",
        "Lower the learning rate or lengthen the warm-up; QK-norm or attnscale.QKClip bounds the logits.",
        ("logit_jump", *_SHARP),
        critical=True,
    ),
    "logit_jump": Cause(
        rules.jumped,
        "jump",
        "logits jumped",
        "max_logit",
        "the largest logit jumped from {usual:.3g} to {value:.3g} ({times:.0f}×)",
        "Look at the last update of their query and key weights, at `scale` and the batch; use attnscale.QKClip.",
        _SHARP,
        sudden=True,
    ),
    "exploding": Cause(
        rules.exploding,
        "exploding",
        "exploding logits",
        "max_logit",
        "the largest logit has grown to {value:.3g}",
        "Lower the learning rate, add QK-norm, or bound the logits with attnscale.QKClip.",
        ("vanishing", "logit_jump"),
    ),
    "dead_values": Cause(
        rules.dead_values,
        "dead",
        "dead values",
        "value_size",
        "the values have size {value:.1g}, usually {usual:.1g}",
        "Look at the value projection: its weights or its input are zero.",
        ("vanishing", "dead_output", "diffuse", "logit_drop"),
    ),
    "dead_output": Cause(
        rules.dead_output,
        "dead",
        "no gradient arrives",
        "output_gradient",
        "the gradient of the output is {value:.1g}, usually {usual:.1g}",
        "Look at the output projection of this layer: its weights are zero, or its output is detached.",
        ("vanishing", "diffuse", "logit_drop"),
    ),
    "logit_drop": Cause(
        rules.dropped,
        "jump",
        "scores vanished",
        "max_logit",
        "all scores became equal, the largest logit fell from {usual:.3g} to {value:.3g}",
        "Look at the query and key weights of these heads and at `scale`: one of them is almost zero.",
        ("diffuse", "vanishing"),
        sudden=True,
    ),
    "rank_collapse": Cause(
        rules.rank_collapsed,
        "rank",
        "rank collapse",
        "token_angle",
        "tokens point into one direction: 1 − cosine is {value:.1g}",
        "Check the residual connections and normalisation before this layer; a larger β slows the collapse.",
        ("logit_jump", "logit_drop", "vanishing", "diffuse", "dead_output"),
    ),
    "vanishing": Cause(
        rules.vanishing,
        "vanishing",
        "vanishing gradient",
        "score_gain",
        "‖(dQ, dK)‖ is only {value:.1g} of ‖dO‖",
        "Look for saturated rows (w_max of 1), query and key weights of zero, and dropout that removes everything.",
    ),
    "diffuse": Cause(
        rules.diffuse,
        "diffuse",
        "diffuse attention",
        "relative_entropy",
        "entropy is {value:.3f} of ln n, {usual:.2f} before",
        "The head attends to all keys alike: try a larger β or less weight decay on its query and key weights.",
    ),
    "mismatch": Cause(
        rules.mismatched,
        "mismatch",
        "forward/backward mismatch",
        "mismatch",
        "row statistics of the backward pass differ by {value:.1g}",
        "Remove in-place operations on query, key or value between forward and backward pass.",
    ),
}
