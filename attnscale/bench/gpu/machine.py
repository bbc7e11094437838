"""The device of the benchmark, with its profile and clock: a GPU, or Triton's interpreter."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnscale._util.files import read_yaml
from attnscale.bench.gpu.problem import Card
from attnscale.errors import ArgumentError, BackendError, MissingDependencyError, reject, reject_type
from attnscale.policies import FormulaPolicy, build_policy
from attnscale.policies.fields import read_between, read_length
from attnscale_kernels import interpreting

SUITE_NAMES = ("attention", "statistics", "adaptive", "decode")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Profiles of known GPUs.
FOLDER = Path(str(resources.files("attnscale.bench.gpu") / "profiles"))

INTERPRETER = "interpreter"

# Larger than the last-level cache of any GPU.
FLUSH_BYTES = 512 * 2**20

# Cycles for which a waiting kernel holds the device while the host queues the timed work: 1 ms at first, at most 1/8 s.
FIRST_HOLD, LONGEST_HOLD = 2_000_000, 256_000_000


@dataclass(frozen=True)
class Profile:
    """Problem sizes, and peak rates of the GPU whose name ends with `device` (empty: unknown GPU, no roofline).

    The batch size is `tokens` / n, or `decode_tokens` / n for the KV cache in decoding. `law` is the policy of
    providers that support one. `check_length` is the size used for verification.
    """

    device: str = ""
    peak_tflops: float | None = None
    bandwidth_gbs: float | None = None
    suites: tuple[str, ...] = SUITE_NAMES
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
        """Check all values before anything is measured; quartiles need two measurements."""
        for name in ("device", "law"):
            if not isinstance(getattr(self, name), str):
                reject_type(name, getattr(self, name), "a name")
        if not isinstance(build_policy(self.law), FormulaPolicy):
            reject("law", self.law, "a policy with a formula of the length")
        if (self.device != "", self.peak_tflops is None, self.bandwidth_gbs is None) not in (
            (True, False, False),
            (False, True, True),
        ):
            reject("device", self.device, "the name of a GPU together with its peak_tflops and bandwidth_gbs")
        for name in ("peak_tflops", "bandwidth_gbs"):
            if getattr(self, name) is not None:
                read_between(name, getattr(self, name), "a number > 0", above=0.0)
        least = {"warm_up": 0, "rounds": 2}
        for name in ("heads", "kv_heads", "tokens", "decode_kv_heads", "decode_tokens", "check_length", *least):
            read_length(name, getattr(self, name), least=least.get(name, 1))
        for name in ("kv_heads", "decode_kv_heads"):
            if self.heads % getattr(self, name):
                reject(name, getattr(self, name), f"a divisor of heads={self.heads}")
        for name, accepted in (("suites", SUITE_NAMES), ("dtypes", tuple(DTYPES))):
            for value in _listed(name, getattr(self, name)):
                if value not in accepted:
                    reject(name, value, f"any of {', '.join(accepted)}")
        for name in ("lengths", "head_dims", "decode_lengths"):
            for value in _listed(name, getattr(self, name)):
                read_length(name, value, least=1 if name == "head_dims" else 2)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile from a YAML file."""
        return cls.parse(read_yaml(path), path)

    @classmethod
    def parse(cls, content: Mapping[str, Any], path: Path) -> Profile:
        """Build a profile from a mapping; `path` is used in error messages."""
        known = [field.name for field in fields(cls)]
        unknown = [key for key in content if key not in known]
        if unknown:
            raise ArgumentError(f"key {unknown[0]!r} in {path} is not accepted: expected {', '.join(known)}")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        return cls(**values)

    def is_for(self, name: str) -> bool:
        """Whether this is the profile of the GPU with this name.

        Vendor names precede the GPU name; a suffix denotes a different GPU.

        >>> card = Profile(device="H200", peak_tflops=989, bandwidth_gbs=4800)
        >>> card.is_for("NVIDIA H200"), card.is_for("NVIDIA H200 NVL"), card.is_for("NVIDIA GH200")
        (True, False, False)
        """
        wanted, words = self.device.lower().split(), name.lower().split()
        return bool(wanted) and words[-len(wanted) :] == wanted

    def card(self, name: str) -> Card | None:
        """Return the peak rates if the profile is for this GPU, else None."""
        if self.peak_tflops is None or self.bandwidth_gbs is None or not self.is_for(name):
            return None
        return Card(float(self.peak_tflops), float(self.bandwidth_gbs))

    def tiny(self) -> Profile:
        """Return a profile that Triton's interpreter runs in seconds. Its matrix products are wrong in bfloat16."""
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
    """Return the profile of a file, or the matching profile of a folder, or default sizes without peak rates."""
    folder = FOLDER if config is None else config
    if config is not None and not folder.is_dir():
        return Profile.read(config)
    for path in sorted(folder.glob("*.yaml")):
        content = read_yaml(path)
        if "device" in content:  # other files are for the CPU
            profile = Profile.parse(content, path)
            if profile.is_for(name):
                return profile
    return Profile()


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or not value:
        reject_type(name, value, "a non-empty list")
    return value


class Telemetry(NamedTuple):
    """Current clock, power and temperature; None for values that cannot be read."""

    mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None

    def known(self) -> dict[str, float]:
        """Return the available values by name.

        >>> Telemetry(mhz=1980.0).known()
        {'mhz': 1980.0}
        """
        return {name: value for name, value in self._asdict().items() if value is not None}


def read_telemetry(device: torch.device) -> Telemetry:
    """Read the telemetry of the last second. torch uses NVIDIA's or AMD's library, which may not be installed."""
    power = _read(torch.cuda.power_draw, device)
    unit = 1 if torch.version.hip else 1000  # torch returns watts for AMD and milliwatts for NVIDIA
    return Telemetry(
        _read(torch.cuda.clock_rate, device),
        None if power is None else power / unit,
        _read(torch.cuda.temperature, device),
    )


def _read(quantity: Callable[[torch.device], int], device: torch.device) -> float | None:
    # Missing packages, drivers or sensors raise vendor-specific exceptions; on ROCm torch returns 0 for unknown values.
    with contextlib.suppress(Exception):
        return float(quantity(device)) or None
    return None


class DeviceClock:
    """Measures device time between two events with a cold cache, excluding host time; memory from torch's allocator.

    A waiting kernel holds the device until the timed work is queued. If the device passes the first event while the
    host is still launching, the measurement is discarded and repeated with twice the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.hold = FIRST_HOLD

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the device time of one call; raise `BackendError` for a function that synchronises."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.room.zero_()
            torch.cuda._sleep(self.hold)  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
            overtaken = start.query()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)
            if not overtaken:
                milliseconds: float = start.elapsed_time(end)
                return milliseconds / 1000
            if self.hold >= LONGEST_HOLD:
                self.hold = FIRST_HOLD  # reset for the next function
                raise BackendError("the host waits for the device within a call, so events would measure host time")
            self.hold *= 2

    def telemetry(self) -> Telemetry:
        """Return the current telemetry of the GPU."""
        return read_telemetry(self.device)

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        """Return the result and the additional peak memory of the second call; the first may compile and tune."""
        function()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = function()
        torch.cuda.synchronize(self.device)
        return result, torch.cuda.max_memory_allocated(self.device) - before


class HostClock:
    """Clock for dry runs, with meaningless times: every function runs once, and its time is reused.

    Memory is not measured: it would differ from that of a GPU.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[Callable[[], object], float] = WeakKeyDictionary()

    def seconds(self, function: Callable[[], Any]) -> float:
        if function not in self.known:
            self.peak(function)
        return self.known[function]

    def peak(self, function: Callable[[], Tensor]) -> tuple[Tensor, int | None]:
        start = time.perf_counter()
        result = function()
        self.known[function] = time.perf_counter() - start
        return result, None

    def telemetry(self) -> Telemetry:
        return Telemetry()


def interleaved(
    functions: Mapping[str, Callable[[], object]], clock: DeviceClock | HostClock, *, warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every function in every round; each round runs all functions in random order."""
    shuffle = random.Random(0)
    for _ in range(warm_up):
        for function in functions.values():
            clock.seconds(function)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            samples[name].append(clock.seconds(functions[name]))
    return samples


class Machine(NamedTuple):
    """A device: `name` as in its rows, `card` with its peak rates if known, `notes` for the printed report."""

    device: torch.device
    name: str
    clock: DeviceClock | HostClock
    card: Card | None
    version: str
    notes: tuple[str, ...] = ()


def this_gpu(config: Path | None) -> tuple[Profile, Machine]:
    """Return the current GPU and its profile."""
    if not torch.cuda.is_available():
        raise BackendError(
            "`attnscale bench gpu` requires a CUDA or ROCm device, and torch finds none: use --dry-run to check the "
            "kernels in triton's interpreter"
        )
    if interpreting():
        raise BackendError("TRITON_INTERPRET is set, so kernels would not run on the GPU: unset it or use --dry-run")
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    profile = choose_profile(config, name)
    card = profile.card(name)
    return profile, Machine(device, name, DeviceClock(device), card, versions(), _about(profile, name, card))


def the_interpreter(config: Path | None) -> tuple[Profile, Machine]:
    """Return Triton's interpreter on this CPU, with a tiny profile."""
    profile = choose_profile(config, INTERPRETER).tiny()
    return profile, Machine(torch.device("cpu"), INTERPRETER, HostClock(), None, versions())


def run_in_interpreter(arguments: Sequence[str]) -> int:
    """Run `attnscale` with these arguments in a process with Triton's interpreter; return its exit code."""
    # One thread: at these sizes, synchronisation costs more than it gains.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-m", "attnscale", *arguments], env=environment).returncode


def versions() -> str:
    """Return the versions of torch and triton."""
    try:
        return f"torch {torch.__version__} triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError("the kernels require triton: pip install triton") from error


def _about(profile: Profile, name: str, card: Card | None) -> tuple[str, ...]:
    if card is not None:
        return (f"roofline of {profile.device}: {card.tflops:g} TFLOP/s in half precision, {card.bandwidth:g} GB/s",)
    if profile.device:
        return (f"no roofline: the profile is for {profile.device!r}, but the GPU is {name!r}",)
    return (f"no roofline: the package has no profile for {name!r}",)
