"""`python -m scripts.calibration coverage|prediction|demo-llm`: see the modules of these names."""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.calibration import coverage


def main() -> None:
    """Run one experiment and print the files it wrote."""
    parser = argparse.ArgumentParser(prog="python -m scripts.calibration", description=__doc__)
    parser.add_argument("experiment", choices=("coverage",))
    parser.add_argument("--output", type=Path, default=Path(".github/assets"), help="folder for tables and figures")
    options = parser.parse_args()
    print(f"wrote {coverage.run(coverage.Coverage(), options.output)}")


if __name__ == "__main__":
    main()
