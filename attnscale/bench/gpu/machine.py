"""Where the benchmark runs: the card that torch sees with the profile for it, or triton's interpreter."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from attnscale.bench.gpu.clock import Clock, DeviceClock, HostClock
from attnscale.bench.gpu.figures import Card
from attnscale.bench.gpu.profile import Profile, choose_profile
from attnscale.errors import BackendError, MissingDependencyError
from attnscale_kernels import interpreting

INTERPRETER = "interpreter"


class Machine(NamedTuple):
    """A device: `name` is that of its rows, `card` its peaks if they are known, `notes` what a reader should know."""

    device: torch.device
    name: str
    clock: Clock
    card: Card | None
    version: str
    notes: tuple[str, ...] = ()


def this_gpu(config: Path | None) -> tuple[Profile, Machine]:
    """The current GPU and what to measure on it."""
    if not torch.cuda.is_available():
        raise BackendError(
            "`attnscale bench gpu` needs a CUDA or ROCm device, and torch sees none: use --dry-run to check the "
            "kernels in triton's interpreter, --static for what compilation tells, or `attnscale bench` for this CPU"
        )
    if interpreting():
        raise BackendError("TRITON_INTERPRET is set, so kernels would not run on the GPU: unset it, or use --dry-run")
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    profile = choose_profile(config, name)
    card = profile.card(name)
    return profile, Machine(device, name, DeviceClock(device), card, versions(), _about(profile, name, card))


def the_interpreter(config: Path | None) -> tuple[Profile, Machine]:
    """This CPU under triton's interpreter, with a profile made tiny."""
    profile = choose_profile(config, INTERPRETER).tiny()
    return profile, Machine(torch.device("cpu"), INTERPRETER, HostClock(), None, versions())


def run_in_interpreter(arguments: Sequence[str]) -> int:
    """The exit status of `attnscale` with these arguments in a process where triton interprets its kernels."""
    # One thread: at these sizes several wait for each other longer than they work.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, "-m", "attnscale", *arguments], env=environment).returncode


def versions() -> str:
    """What was measured: torch and triton."""
    try:
        return f"torch {torch.__version__} triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError("the kernels need triton: pip install triton") from error


def _about(profile: Profile, name: str, card: Card | None) -> tuple[str, ...]:
    if card is not None:
        return (f"roofline of {profile.device}: {card.tflops:g} TFLOP/s in half precision, {card.bandwidth:g} GB/s",)
    if profile.device:
        return (f"no share of the roofline: the profile is for {profile.device!r}, the card found is {name!r}",)
    return (f"no share of the roofline: the package has no profile for {name!r}",)
