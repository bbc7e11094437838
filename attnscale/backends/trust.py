"""Whether "auto" may use the kernels on a device: only after they have passed a self-check at their first use.

The outcome is valid for one dtype, device, driver, kernel source, and version of torch, triton and this package. It is
cached in the process and in a file of the user's cache folder. If the file cannot be read or written, every process
runs the check. ATTNSCALE_TRITON=0 and =1 override the outcome.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import attnscale_kernels
from attnscale._util import state
from attnscale._util.files import cache_folder, write_whole
from attnscale._util.optional import version_of
from attnscale.errors import AttnScaleWarning, reject

BY_HAND = "ATTNSCALE_TRITON"

# Returns a description of the kernels' fault on a device with a dtype; None if the check passes.
Check = Callable[[torch.device, torch.dtype], str | None]

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """Result and date of a check."""

    fault: str | None
    day: str

    def __str__(self) -> str:
        return f"{'passed' if self.fault is None else f'failed ({self.fault})'} on {self.day}"


def why_distrusted(device: torch.device, dtype: torch.dtype, check: Check) -> str | None:
    """Return why "auto" does not use the kernels, or None. The first use of a device and dtype runs the check."""
    by_hand = chosen_by_hand()
    if by_hand is not None:
        return None if by_hand else f"{BY_HAND}=0"
    outcome = state.TRITON_OUTCOMES.get((device, dtype))
    if outcome is None:
        with state.TRITON_CHECKING:
            outcome = state.TRITON_OUTCOMES.get((device, dtype)) or remembered(device, dtype)
            if outcome is None:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return "they have not been checked on this device, and cannot be while a CUDA graph is captured"
                try:
                    outcome = repeat(device, dtype, check)
                except torch.OutOfMemoryError:
                    return "they have not been checked on this device, which is out of memory"
            state.TRITON_OUTCOMES[device, dtype] = outcome
            if outcome.fault is not None:
                _warn(device, dtype, outcome)
    return None if outcome.fault is None else f"their check on this device {outcome}"


def chosen_by_hand() -> bool | None:
    """Return the value of ATTNSCALE_TRITON as a bool; None if it is not set."""
    value = os.environ.get(BY_HAND)
    if value in (None, ""):
        return None
    if value not in ("0", "1"):
        reject(BY_HAND, value, "'0' or '1', or an unset environment variable")
    return value == "1"


def repeat(device: torch.device, dtype: torch.dtype, check: Check) -> Outcome:
    """Run the check regardless of cached outcomes, and cache the new outcome."""
    logger.info("checking the triton kernels on %s in %s; runs once and compiles them", device, dtype)
    outcome = Outcome(_fault_in_new_thread(device, dtype, check), time.strftime("%Y-%m-%d"))
    content = {"identity": identity(device, dtype), **outcome._asdict()}
    try:
        file = _file(device, dtype)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.info("the outcome of the check cannot be cached: %s", error)
    return outcome


def remembered(device: torch.device, dtype: torch.dtype) -> Outcome | None:
    """Return the cached outcome of an earlier check by any process, or None."""
    try:
        content = json.loads(_file(device, dtype).read_text(encoding="utf-8"))
        if content["identity"] != identity(device, dtype):
            return None
        outcome = Outcome(content["fault"], content["day"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # missing or corrupt
        return None
    return outcome if isinstance(outcome.fault, str | None) and isinstance(outcome.day, str) else None


def identity(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return everything the outcome of a check depends on."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        place = {
            "device": properties.name,
            "capability": getattr(properties, "gcnArchName", "") or f"{properties.major}.{properties.minor}",
            "driver": f"{driver}, built for {torch.version.cuda or torch.version.hip}",
        }
    else:
        place = {"device": f"{device.type} of {platform.machine()}", "capability": "", "driver": ""}
    versions = {name: version_of(name) for name in ("attnscale", "torch", "triton")}
    return {**place, **versions, "kernels": _digest(), "dtype": str(dtype).removeprefix("torch.")}


def _file(device: torch.device, dtype: torch.dtype) -> Path:
    """Return the cache file of an identity. No two identities share a file, so concurrent processes do not conflict."""
    key = hashlib.sha256(json.dumps(identity(device, dtype)).encode()).hexdigest()
    return cache_folder() / f"triton-{key[:24]}.json"


def _digest() -> str:
    """Return a digest of the kernel source, which can change without the version in an editable install."""
    digest = hashlib.sha256()
    for path in sorted(Path(attnscale_kernels.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _fault_in_new_thread(device: torch.device, dtype: torch.dtype, check: Check) -> str | None:
    """Run the check in a new thread, free of the caller's modes.

    These include inference mode, autocast, no_grad, fake tensors, function transforms and torch.compile.
    """
    found: list[str | None] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(check(device, dtype))
        except torch.OutOfMemoryError as error:
            raised.append(error)
        except Exception as error:
            logger.debug("the check of the kernels raised", exc_info=True)
            lines = str(error).strip().splitlines()
            found.append(f"{type(error).__name__}: {lines[0] if lines else 'no message'}")

    thread = threading.Thread(target=run, name="attnscale-check")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def _warn(device: torch.device, dtype: torch.dtype, outcome: Outcome) -> None:
    warnings.warn(
        f"the triton kernels are not used on {device} in {dtype}: their check {outcome}. `auto` uses torch's SDPA "
        "instead, and blockwise for statistics, softcap and sinks. `attnscale doctor` repeats the check; "
        f"{BY_HAND}=1 enables the kernels regardless",
        AttnScaleWarning,
        stacklevel=4,
    )
