"""Run the tests of `attnscale.hf` with several releases of transformers, each in an environment of its own.

make test-versions                                          # oldest, newest, and the newest that vLLM 0.32 accepts
python -m scripts.versions --transformers 5.9.0             # another release
python -m scripts.versions --python python3.13              # another interpreter

Environments are created in `.cache/versions`, 1.2 GB each, and reused. The versions and the numbers of passed, skipped
and failed tests go to `.github/assets/versions.csv`, one row per interpreter and release. Left out are the slow tests
with every model type, except those of applying, removing, saving and loading.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from attnscale._util.files import write_whole

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "versions"
RESULTS = ROOT / ".github" / "assets" / "versions.csv"
RELEASES = ("5.0.0", "5.19.0", "5.23.0")
TESTS = ("tests/hf", "--ignore-glob=*/test_zoo_*.py")

# Each release of transformers has its own bounds for these; all other packages are pinned as in `make setup`.
UNPINNED = {"transformers", "huggingface-hub", "tokenizers"}
PACKAGES = ("torch", "einops", "accelerate", "safetensors", "peft", "optimum-quanto", "pytest", "hypothesis", "pyyaml")
VERSIONS = ("transformers", "python", "torch", "accelerate", "peft", "huggingface-hub", "tokenizers")
COUNTS = ("passed", "skipped", "failed")


def main() -> None:
    """Test every combination of interpreter and release, and exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", nargs="+", default=RELEASES, help="releases (default: %(default)s)")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="CSV file (default: .github/assets/versions.csv)")
    given = parser.parse_args()
    failed = False
    for interpreter in given.python:
        for transformers in given.transformers:
            row = run_tests(make_environment(interpreter, transformers))
            merge(row, given.output)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            failed |= row["failed"] != "0"
    sys.exit(failed)


def make_environment(interpreter: str, transformers: str) -> Path:
    """Return the Python of an environment with a release of transformers; it is created if it does not exist."""
    version = output(interpreter, "-c", "import platform; print(platform.python_version())")
    folder = FOLDER / f"python-{version}-transformers-{transformers}"
    python, installed = folder / "bin" / "python", folder / ".installed"
    if not installed.exists():
        print(f"creating {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = folder / "constraints.txt"
        pins = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
        kept = [pin for pin in pins if re.split("[=# ]", pin)[0].lower() not in UNPINNED]
        constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "-c", str(constraints), f"transformers=={transformers}", *PACKAGES], check=True)
        installed.touch()
    return python


def run_tests(python: Path) -> dict[str, str]:
    """Run the tests in an environment and return a row of the table."""
    names = [name for name in VERSIONS if name != "python"]
    code = f"import importlib.metadata as m, platform; print(platform.python_version(), *map(m.version, {names}))"
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [str(python), "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    found = dict(zip(("python", *names), output(str(python), "-c", code).split(), strict=True))
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, skipped, *wrong = (int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors"))
    counts = (total - skipped - sum(wrong), skipped, sum(wrong))
    return {name: found[name] for name in VERSIONS} | dict(zip(COUNTS, map(str, counts), strict=True))


def merge(row: dict[str, str], file: Path) -> None:
    """Replace the row of the same interpreter and release in a CSV file, or add the row."""
    rows = list(csv.DictReader(file.read_text(encoding="utf-8").splitlines())) if file.exists() else []
    rows = [old for old in rows if _identity(old) != _identity(row)]
    lines = [",".join(row), *(",".join(one.values()) for one in sorted([*rows, row], key=_identity))]
    write_whole(file, "\n".join(lines) + "\n")


def _identity(row: dict[str, str]) -> list[list[int]]:
    return [[int(number) for number in re.findall(r"\d+", row[name])] for name in ("transformers", "python")]


def output(*command: str) -> str:
    """Return what a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
