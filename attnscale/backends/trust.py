"""Whether "auto" may use the kernels on a device: where they have passed a check, which is run at their first use.

The outcome holds for one device, driver, version of torch, triton, this package and the kernels' source, and dtype. It
is kept for the process, and for others in a file of the user's cache folder; where that cannot be read or written, the
check is run in each process. ATTNSCALE_TRITON=0 and =1 decide by hand.
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

# The kernels' fault on a device with a dtype, in words; None where there is none.
Check = Callable[[torch.device, torch.dtype], str | None]

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What a check has found, and when."""

    fault: str | None
    day: str

    def __str__(self) -> str:
        return f"{'passed' if self.fault is None else f'failed ({self.fault})'} on {self.day}"


def why_distrusted(device: torch.device, dtype: torch.dtype, check: Check) -> str | None:
    """Why "auto" leaves the kernels alone on a device, or None; the first use of a device and dtype runs the check."""
    by_hand = chosen_by_hand()
    if by_hand is not None:
        return None if by_hand else f"{BY_HAND}=0"
    outcome = state.TRITON_OUTCOMES.get((device, dtype))
    if outcome is None:
        with state.TRITON_CHECKING:
            outcome = state.TRITON_OUTCOMES.get((device, dtype)) or remembered(device, dtype)
            if outcome is None:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return "they are not checked yet on this device, and cannot be while a CUDA graph is captured"
                try:
                    outcome = repeat(device, dtype, check)
                except torch.OutOfMemoryError:
                    return "they are not checked yet on this device, which has no memory for it now"
            state.TRITON_OUTCOMES[device, dtype] = outcome
            if outcome.fault is not None:
                _warn(device, dtype, outcome)
    return None if outcome.fault is None else f"their check on this device {outcome}"


def chosen_by_hand() -> bool | None:
    """What ATTNSCALE_TRITON says; None where it is not set."""
    value = os.environ.get(BY_HAND)
    if value in (None, ""):
        return None
    if value not in ("0", "1"):
        reject(BY_HAND, value, "'0' or '1' as an environment variable, or none")
    return value == "1"


def repeat(device: torch.device, dtype: torch.dtype, check: Check) -> Outcome:
    """Run the check, whatever is remembered, and remember what it finds."""
    logger.info("checking the triton kernels on %s in %s, once: it compiles them", device, dtype)
    outcome = Outcome(_fault_in_new_thread(device, dtype, check), time.strftime("%Y-%m-%d"))
    content = {"identity": identity(device, dtype), **outcome._asdict()}
    try:
        file = _file(device, dtype)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content, indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        logger.info("the outcome of the check cannot be kept: %s", error)
    return outcome


def remembered(device: torch.device, dtype: torch.dtype) -> Outcome | None:
    """What an earlier check has found, by this process or another; None where there was none."""
    try:
        content = json.loads(_file(device, dtype).read_text(encoding="utf-8"))
        if content["identity"] != identity(device, dtype):
            return None
        outcome = Outcome(content["fault"], content["day"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # missing, or not what was written
        return None
    return outcome if isinstance(outcome.fault, str | None) and isinstance(outcome.day, str) else None


def identity(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """All that the outcome of a check depends on."""
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
    """One file for each identity, so that processes never change one that another reads."""
    key = hashlib.sha256(json.dumps(identity(device, dtype)).encode()).hexdigest()
    return cache_folder() / f"triton-{key[:24]}.json"


def _digest() -> str:
    """Of the kernels' source, which in an editable installation changes without the version."""
    digest = hashlib.sha256()
    for path in sorted(Path(attnscale_kernels.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _fault_in_new_thread(device: torch.device, dtype: torch.dtype, check: Check) -> str | None:
    """What the check finds in a thread of its own.

    There no mode of the caller applies: inference, autocast, no_grad, fake tensors, a transform or torch.compile.
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
        f"the triton kernels are not used on {device} in {dtype}: their check {outcome}. `auto` takes the blockwise "
        f"backend in their place. `attnscale doctor` repeats the check; {BY_HAND}=1 uses the kernels all the same",
        AttnScaleWarning,
        stacklevel=4,
    )
