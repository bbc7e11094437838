"""What is measured on which card: a YAML file with the card's peaks and the sizes, one for each kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from attnscale._util.yaml_files import read_yaml
from attnscale.bench.gpu.figures import Card
from attnscale.errors import ArgumentError, reject, reject_type
from attnscale.policies import FormulaPolicy, build_policy
from attnscale.policies.fields import read_between, read_length

SUITES = ("attention", "statistics", "adaptive", "decode")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Profiles of known cards, which come with the package.
FOLDER = Path(str(resources.files("attnscale.bench.gpu") / "profiles"))


@dataclass(frozen=True)
class Profile:
    """Sizes, and the peaks of the card whose name ends with `device` (empty: no card is known, and no roofline).

    The batch is such that B·n is `tokens`, or `decode_tokens` for the cache of a decoding step; `law` is the
    temperature of the providers that can have one; `check_length` the size at which numbers are checked.
    """

    device: str = ""
    peak_tflops: float | None = None
    bandwidth_gbs: float | None = None
    suites: tuple[str, ...] = SUITES
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("bfloat16",)
    heads: int = 16
    kv_heads: int = 16
    tokens: int = 16384
    decode_lengths: tuple[int, ...] = (4096, 32768, 131072)
    decode_kv_heads: int = 4
    decode_tokens: int = 524288
    law: str = "log"
    check_length: int = 321
    warm_up: int = 5
    rounds: int = 30

    def __post_init__(self) -> None:
        """Refuse what would fail only after minutes of measuring; quartiles need two measurements."""
        for name in ("device", "law"):
            if not isinstance(getattr(self, name), str):
                reject_type(name, getattr(self, name), "a name")
        if not isinstance(build_policy(self.law), FormulaPolicy):
            reject("law", self.law, "a policy that is a formula of the length")
        if (self.device != "", self.peak_tflops is None, self.bandwidth_gbs is None) not in (
            (True, False, False),
            (False, True, True),
        ):
            reject("device", self.device, "the name of a card together with its peak_tflops and bandwidth_gbs")
        for name in ("peak_tflops", "bandwidth_gbs"):
            if getattr(self, name) is not None:
                read_between(name, getattr(self, name), "a number > 0", above=0.0)
        least = {"warm_up": 0, "rounds": 2}
        for name in ("heads", "kv_heads", "tokens", "decode_kv_heads", "decode_tokens", "check_length", *least):
            read_length(name, getattr(self, name), least=least.get(name, 1))
        for name in ("kv_heads", "decode_kv_heads"):
            if self.heads % getattr(self, name):
                reject(name, getattr(self, name), f"a divisor of heads={self.heads}")
        for name, accepted in (("suites", SUITES), ("dtypes", tuple(DTYPES))):
            for value in _listed(name, getattr(self, name)):
                if value not in accepted:
                    reject(name, value, f"some of {', '.join(accepted)}")
        for name in ("lengths", "head_dims", "decode_lengths"):
            for value in _listed(name, getattr(self, name)):
                read_length(name, value, least=1 if name == "head_dims" else 2)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """The profile in a YAML file."""
        return cls.parse(read_yaml(path), path)

    @classmethod
    def parse(cls, content: Mapping[str, Any], path: Path) -> Profile:
        """The profile that a mapping describes; `path` is where it comes from."""
        known = [field.name for field in fields(cls)]
        unknown = [key for key in content if key not in known]
        if unknown:
            raise ArgumentError(f"key {unknown[0]!r} in {path} is not accepted: expected {', '.join(known)}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        return cls(**values)

    def is_for(self, name: str) -> bool:
        """Whether the card of this name is the one whose peaks are known.

        Makers put their name before that of a card, and after it what makes another card of it.

        >>> card = Profile(device="H200", peak_tflops=989, bandwidth_gbs=4800)
        >>> card.is_for("NVIDIA H200"), card.is_for("NVIDIA H200 NVL"), card.is_for("NVIDIA GH200")
        (True, False, False)
        """
        wanted, words = self.device.lower().split(), name.lower().split()
        return bool(wanted) and words[-len(wanted) :] == wanted

    def card(self, name: str) -> Card | None:
        """The peaks, if they are those of the card of this name."""
        if self.peak_tflops is None or self.bandwidth_gbs is None or not self.is_for(name):
            return None
        return Card(float(self.peak_tflops), float(self.bandwidth_gbs))

    def tiny(self) -> Profile:
        """Sizes that triton's interpreter gets through in seconds; its matrix products are wrong in bfloat16."""
        return replace(
            self,
            lengths=(32, 64),
            head_dims=(32,),
            dtypes=("float32",),
            heads=2,
            kv_heads=1,
            tokens=32,
            decode_lengths=(64, 128),
            decode_kv_heads=1,
            decode_tokens=64,
            check_length=40,
            warm_up=0,
            rounds=2,
        )


def choose_profile(config: Path | None, name: str) -> Profile:
    """The profile in a file; or in a folder the one for the card of this name; or the built-in sizes without peaks."""
    folder = FOLDER if config is None else config
    if config is not None and not folder.is_dir():
        return Profile.read(config)
    for path in sorted(folder.glob("*.yaml")):
        content = read_yaml(path)
        if "device" in content:  # the others are plans for the CPU
            profile = Profile.parse(content, path)
            if profile.is_for(name):
                return profile
    return Profile()


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or not value:
        reject_type(name, value, "a list that is not empty")
    return value
