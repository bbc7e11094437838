"""Everything a reader of a benchmark needs, in one file to attach to an issue."""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from attnscale._util.files import write_whole
from attnscale.bench.gpu.machine import Machine
from attnscale.bench.gpu.profile import Profile

PACKAGES = ("attnscale", "torch", "triton", "flash-attn", "flash-attn-3", "nvidia-ml-py", "numpy", "matplotlib")


def write_bundle(path: Path, csv: Path, pictures: Sequence[Path], texts: Mapping[str, str]) -> None:
    """A zip of the CSV, the pictures and texts by the names of their files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(csv, "gpu.csv")
        for picture in pictures:
            archive.write(picture, f"plots/{picture.name}")
        for name, text in texts.items():
            archive.writestr(name, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())


def environment(profile: Profile, machine: Machine) -> str:
    """Versions, the card and its state, and what was measured, as JSON; nothing that tells whose machine it is."""
    found = {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "device": machine.name,
        "properties": _properties(machine.device),
        "telemetry": machine.clock.telemetry()._asdict(),
        "profile": asdict(profile),
        "notes": machine.notes,
    }
    return json.dumps(found, indent=1) + "\n"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _properties(device: torch.device) -> dict[str, object]:
    """What torch knows of the card that decides about speed."""
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    names = (
        "major", "minor", "gcnArchName", "multi_processor_count", "total_memory", "L2_cache_size", "clock_rate",
        "memory_clock_rate", "memory_bus_width", "warp_size",
    )  # fmt: skip
    return {name: getattr(found, name) for name in names if hasattr(found, name)}
