"""Causes of events: the rule that recognises each, its message, and what to try.

A rule compares a head with limits, with its own history, or with the rest of the model. A new cause is a rule and a row
of `CAUSES`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from attnscale.diagnostics.events.signals import (
    BROAD,
    FIRST_REPORTS,
    KEPT,
    Head,
    Place,
    Report,
    Signals,
    Symptom,
    median,
)

FEW_KEYS = 8.0  # rows with fewer visible keys are near uniform, or near one key, by chance
SMALL_LOGIT = 8.0  # logits below do not concentrate attention
SINK = 0.8  # weight on the first keys of an attention sink

Rule = Callable[[Report], dict[Place, Symptom]]


def broken(report: Report) -> dict[Place, Symptom]:
    """The heads in which NaN or infinity came first."""
    first = min((fault[:2] for fault in report.faults.values()), default=None)
    return {place: Symptom(math.nan, fault[3]) for place, fault in report.faults.items() if fault[:2] == first}


def _is_collapsed(now: Signals, limit: float) -> bool:
    sharp = now.peak > limit and now.share < 1 - limit + 0.05
    return sharp and now.visible > FEW_KEYS and not now.first > SINK


def wrong_temperature(report: Report) -> dict[Place, Symptom]:
    """All heads are uniform under a very small β, or half of them are sharp only because of a large one."""
    limit = report.limits.temperature
    if limit is None:
        return {}
    flat = report.where(
        lambda now, _: (
            Symptom(now.beta, limit) if now.beta < limit and now.share > 0.99 and now.visible > FEW_KEYS else None
        )
    )
    lasting = "temperature" in report.open

    def is_steep(now: Signals) -> bool:
        # The raw scores, logit / β, are too small to concentrate attention.
        borrowed = now.logit < SMALL_LOGIT * now.beta and now.share < 0.75
        return now.beta > 8 and now.logit > SMALL_LOGIT and (lasting or borrowed)

    steep = report.where(lambda now, _: Symptom(now.beta, 1.0) if is_steep(now) else None)
    return report.wide(flat, 0.9) or report.wide(steep, 0.5)


def diverging(report: Report) -> dict[Place, Symptom]:
    """Many heads lose their entropy while their logits and their values grow: all weights grow, not only some."""
    if report.limits.collapsed is None:
        return {}

    def rule(now: Signals, head: Head) -> Symptom | None:
        logit, value, share = (head.usual(name) for name in ("logit", "value", "share"))
        grown = now.logit > max(report.growth * logit, 50.0) and now.value > 2 * value
        return Symptom(now.share, share) if grown and now.share < 0.75 * share else None

    return report.wide(report.where(rule))


def collapsed(report: Report) -> dict[Place, Symptom]:
    """A large share of the heads puts all weight on single keys, and did not before."""
    limit = report.limits.collapsed
    if limit is None:
        return {}

    def rule(now: Signals, head: Head) -> Symptom | None:
        before = head.usual("share")
        new = math.isnan(before) or before > 0.3
        return Symptom(now.share, before) if new and _is_collapsed(now, limit) else None

    return report.wide(report.where(rule))


def jumped(report: Report) -> dict[Place, Symptom]:
    """The largest logit of a head rose suddenly, compared with its own history."""
    limit, lasting = report.limits.jump, report.open.get("logit_jump", frozenset())
    if limit is None:
        return {}

    def rule(now: Signals, head: Head) -> Symptom | None:
        usual = max(abs(head.usual("logit")), 1.0)
        return Symptom(now.logit, head.usual("logit")) if now.logit > max(SMALL_LOGIT, 3 * usual) else None

    def is_sudden(place: Place) -> bool:
        now, head = report.now[place], report.heads[place]
        return now.logit > report.growth * max(abs(head.usual("logit")), 1.0) and head.jump(now) > limit

    high = report.where(rule)
    certain = {place for place in high if place in lasting or is_sudden(place)}
    # Where half of the heads of a layer or model jump, the others, whose history varies more, jump as well.
    if 2 * len(certain) >= len(report.now):
        return high
    layers, heads = Counter(layer for layer, _ in certain), Counter(layer for layer, _ in report.now)
    whole = {layer for layer, number in layers.items() if 2 * number >= heads[layer]}
    return {place: symptom for place, symptom in high.items() if place in certain or place[0] in whole}


def dropped(report: Report) -> dict[Place, Symptom]:
    """All scores of a head are almost zero: 1 − entropy / ln n fell to less than a five-hundredth."""
    if report.limits.jump is None:
        return {}

    def rule(now: Signals, head: Head) -> Symptom | None:
        usual, logit = 1 - head.usual("share"), head.usual("logit")
        flat = usual > 1e-3 and 1 - now.share < usual / 500 and now.visible > FEW_KEYS
        return Symptom(now.logit, logit) if flat and abs(now.logit) < abs(logit) / 20 else None

    return report.where(rule)


def exploding(report: Report) -> dict[Place, Symptom]:
    """The largest logit of a head is above the limit and has at least doubled since the start of the run."""
    limit = report.limits.exploding
    if limit is None:
        return {}
    return report.where(
        lambda now, head: Symptom(now.logit, limit) if now.logit > limit and now.logit > 2 * head.first_logit else None
    )


def dead_values(report: Report) -> dict[Place, Symptom]:
    """The values of a head are zero, or tiny compared with their own history."""
    return _dead(report, "value")


def dead_output(report: Report) -> dict[Place, Symptom]:
    """No gradient arrives at the output of a head, or almost none compared with its history or other layers."""
    found = _dead(report, "arriving")
    reached = False  # a layer before this one has a gradient
    for place, now in report.now.items() if report.limits.dead is not None else ():
        if math.isnan(now.arriving) and reached:
            found[place] = Symptom(0.0, report.heads[place].usual("arriving"))
        reached |= now.arriving > 0
    return found


def _dead(report: Report, name: str) -> dict[Place, Symptom]:
    limit = report.limits.dead
    if limit is None:
        return {}
    typical = median(getattr(now, name) for now in report.now.values())

    def rule(now: Signals, head: Head) -> Symptom | None:
        value, usual = getattr(now, name), head.usual(name)
        known = usual if len(head.past) >= FIRST_REPORTS else math.nan
        return Symptom(value, usual) if value < limit * known or value <= 1e-6 * typical else None

    return report.where(rule)


def rank_collapsed(report: Report) -> dict[Place, Symptom]:
    """From some layer on, all tokens point into one direction, and almost no gradient gets back to the first layer.

    Early in training, tokens may be almost parallel for some time, because the model first learns their mean; then
    gradients still reach all layers.
    """
    limit = report.limits.rank
    if limit is None:
        return {}
    angles, arriving = report.by_layer("token_angle"), report.by_layer("arriving")
    if len(angles) < 2:
        return {}
    first = next(iter(angles))
    differ = angles[first] > 10 * limit  # the tokens of the first layer
    cut_off = arriving.get(first, math.nan) < 1e-3 * max(arriving.values(), default=math.nan)
    flat = {layer for layer, angle in angles.items() if angle < 1e-3 * limit or (angle < limit and differ and cut_off)}
    return {place: Symptom(angles[place[0]], limit) for place in report.now if place[0] in flat}


def vanishing(report: Report) -> dict[Place, Symptom]:
    """Almost no gradient passes from the output of a head to its queries and keys."""
    limit = report.limits.vanishing
    if limit is None:
        return {}
    return report.where(lambda now, _: Symptom(now.score_gain, limit) if now.score_gain < limit else None)


def diffuse(report: Report) -> dict[Place, Symptom]:
    """A head lost its focus, or stays uniform while three quarters of the others are focused."""
    limit = report.limits.diffuse
    if limit is None:
        return {}
    others = sum(now.share < BROAD for now in report.now.values()) > 0.75 * len(report.now)

    def rule(now: Signals, head: Head) -> Symptom | None:
        if not (now.share > limit and now.visible > FEW_KEYS):
            return None
        lost = head.focus > 1 - BROAD and 1 - now.share < 0.05 * head.focus
        never = others and head.reports >= KEPT and head.focus < 1e-3
        return Symptom(now.share, 1 - head.focus) if lost or never else None

    return report.where(rule)


def mismatched(report: Report) -> dict[Place, Symptom]:
    """Forward and backward statistics of a row differ."""
    limit = report.limits.mismatch
    if limit is None:
        return {}
    return report.where(lambda now, _: Symptom(now.mismatch, limit) if now.mismatch > limit else None)


class Cause(NamedTuple):
    """A kind of event."""

    rule: Rule
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
        broken,
        "NaN or infinity",
        "broken_row",
        "NaN or infinity",
        "Stop, restore the last checkpoint and inspect this layer; Monitor(dump=...) writes its queries and keys.",
        ("temperature", "divergence", "logit_jump", *_SHARP, "mismatch"),
        sudden=True,
        critical=True,
    ),
    "temperature": Cause(
        wrong_temperature,
        "wrong temperature",
        "beta",
        "the temperature β = {value:.3g} is far too {size}",
        "Use a policy with β near 1 at the training length: an anchored law, or another gamma.",
        ("divergence", "logit_jump", *_SHARP),
        critical=True,
    ),
    "divergence": Cause(
        diverging,
        "entropy collapse of a diverging model",
        "relative_entropy",
        "entropy fell from {usual:.2f} to {value:.2f} of ln n while logits and values grew",
        "Lower the learning rate or lengthen the warm-up, and go back to a checkpoint before this step.",
        ("logit_jump", *_SHARP),
        sudden=True,
        critical=True,
    ),
    "collapse": Cause(
        collapsed,
        "entropy collapse",
        "relative_entropy",
        "entropy fell from {usual:.2f} to {value:.2f} of ln n",
        "Lower the learning rate or lengthen the warm-up; QK-norm or attnscale.QKClip bounds the logits.",
        ("logit_jump", *_SHARP),
        critical=True,
    ),
    "logit_jump": Cause(
        jumped,
        "logits jumped",
        "max_logit",
        "the largest logit jumped from {usual:.3g} to {value:.3g} ({times:.0f}×)",
        "Look at the last update of their query and key weights, at `scale` and the batch; use attnscale.QKClip.",
        _SHARP,
        sudden=True,
    ),
    "exploding": Cause(
        exploding,
        "exploding logits",
        "max_logit",
        "the largest logit has grown to {value:.3g}",
        "Lower the learning rate, add QK-norm, or bound the logits with attnscale.QKClip.",
        ("vanishing", "logit_jump"),
    ),
    "dead_values": Cause(
        dead_values,
        "dead values",
        "value_size",
        "the values have size {value:.1g}, usually {usual:.1g}",
        "Look at the value projection: its weights or its input are zero.",
        ("vanishing", "dead_output", "diffuse", "logit_drop"),
    ),
    "dead_output": Cause(
        dead_output,
        "no gradient arrives",
        "output_gradient",
        "the gradient of the output is {value:.1g}, usually {usual:.1g}",
        "Look at the output projection of this layer: its weights are zero, or its output is detached.",
        ("vanishing", "diffuse", "logit_drop"),
    ),
    "logit_drop": Cause(
        dropped,
        "scores vanished",
        "max_logit",
        "all scores became equal, the largest logit fell from {usual:.3g} to {value:.3g}",
        "Look at the query and key weights of these heads and at `scale`: one of them is almost zero.",
        ("diffuse", "vanishing"),
        sudden=True,
    ),
    "rank_collapse": Cause(
        rank_collapsed,
        "rank collapse",
        "token_angle",
        "tokens point into one direction: 1 − cosine is {value:.1g}",
        "Check the residual connections and normalisation before this layer; a larger β slows the collapse.",
        ("logit_jump", "logit_drop", "vanishing", "diffuse", "dead_output"),
    ),
    "vanishing": Cause(
        vanishing,
        "vanishing gradient",
        "score_gain",
        "‖(dQ, dK)‖ is only {value:.1g} of ‖dO‖",
        "Look for saturated rows (w_max of 1), query and key weights of zero, and dropout that removes everything.",
    ),
    "diffuse": Cause(
        diffuse,
        "diffuse attention",
        "relative_entropy",
        "entropy is {value:.3f} of ln n, {usual:.2f} before",
        "The head attends to all keys alike: try a larger β or less weight decay on its query and key weights.",
    ),
    "mismatch": Cause(
        mismatched,
        "forward/backward mismatch",
        "mismatch",
        "row statistics of the backward pass differ by {value:.1g}",
        "Remove in-place operations on query, key or value between forward and backward pass.",
    ),
}
