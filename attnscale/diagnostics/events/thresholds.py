"""Limits of the rules that recognise events."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from attnscale._util.checks import read_int, read_number
from attnscale._util.files import read_yaml
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
