"""Write the kernels as a HuggingFace Hub repository, which `kernels.get_kernel` can load.

    python scripts/hub_kernel.py                 # into dist/hub-kernel
    python scripts/hub_kernel.py --output FOLDER

The folder has the kernel-builder layout: `build.toml`, the source in `torch-ext/`, and the build in
`build/torch-universal/`, next to its `metadata.json`. Triton compiles at run time, so the build is a copy of the
source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
VARIANT = "torch-universal"


def write(output: Path, source: Path = KERNELS) -> Path:
    """Write the repository, replacing an earlier build, and return the build folder."""
    general = tomllib.loads((source / "build.toml").read_text(encoding="utf-8"))["general"]
    package = general["name"].replace("-", "_")
    build = output / "build" / VARIANT
    for folder in (build, output / "torch-ext" / package):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source / package, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build.toml", "README.md"):
        shutil.copy(source / name, output / name)
    (build / "metadata.json").write_text(json.dumps(_metadata(general, build), indent=2) + "\n", encoding="utf-8")
    return build


def _metadata(general: dict[str, Any], build: Path) -> dict[str, Any]:
    """Return the loader metadata. The id becomes the package name in a process, so it differs between builds."""
    digest = hashlib.sha256()
    for path in sorted(build.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(build).as_posix().encode() + b"\0" + path.read_bytes())
    package = general["name"].replace("-", "_")
    return {
        "id": f"_{package}_{general['version']}_{digest.hexdigest()[:12]}",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "upstream": general["upstream"],
        "python-depends": [],
        "backend": {"type": general["backends"][0]},  # the format allows a single backend
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=KERNELS.parent / "dist" / "hub-kernel")
    print(f"wrote {write(parser.parse_args().output)}")


if __name__ == "__main__":
    main()
