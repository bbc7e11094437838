"""Rotary embeddings stretched for longer contexts, as the command line writes them: "yarn:4"."""

from __future__ import annotations

from typing import Any

from attnscale.errors import ArgumentError, reject

KINDS = ("yarn", "linear")
UNSTRETCHED = "own"  # the rotary embedding that the model's config has


def read_rope(rope: str) -> tuple[str, float]:
    """Kind and factor.

    >>> read_rope("yarn:4")
    ('yarn', 4.0)
    """
    kind, _, factor = rope.partition(":")
    try:
        number = float(factor)
    except ValueError:
        number = 0.0
    if kind not in KINDS or not 1 <= number < float("inf"):
        reject("rope", rope, f"{' or '.join(f'{kind}:4' for kind in KINDS)}, with a factor >= 1, or {UNSTRETCHED}")
    return kind, number


def stretch(config: Any, rope: str | None, trained_length: int) -> None:
    """Stretch the rotary embedding of a config in place; layers with a sliding window keep theirs.

    Temperature is the policy's: YaRN's own factor of the logits is switched off. (The policy yarn:factor=4 has it.)
    """
    if rope is None or rope == UNSTRETCHED:
        return
    kind, factor = read_rope(rope)
    text = config.get_text_config()
    known = getattr(text, "rope_parameters", None)
    if not known:
        raise ArgumentError(f"rope={rope!r} is not accepted: a {text.model_type} model has no rotary embedding")
    stretched: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        stretched |= {"original_max_position_embeddings": trained_length, "attention_factor": 1.0}
    if "rope_theta" in known:
        text.rope_parameters = _base(known) | stretched
    else:  # a rotary embedding for each type of layer
        text.rope_parameters = known | {"full_attention": _base(known["full_attention"]) | stretched}


def _base(parameters: dict[str, Any]) -> dict[str, Any]:
    """What a rotary embedding is without any stretching that it had."""
    return {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
