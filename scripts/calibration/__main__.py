"""`python -m scripts.calibration coverage|prediction|smollm2`: see the modules of these names."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from attnscale.cli.parser import shown_progress
from scripts.calibration import coverage, prediction, prediction_tables, smollm2


def main() -> None:
    """Run one experiment and print the files it wrote."""
    parser = argparse.ArgumentParser(prog="python -m scripts.calibration", description=__doc__)
    parser.add_argument("experiment", choices=("coverage", "prediction", "smollm2"))
    parser.add_argument("--output", type=Path, default=Path(".github/assets"), help="folder for tables and figures")
    options = parser.parse_args()
    if options.experiment == "coverage":
        print(f"wrote {coverage.run(coverage.Coverage(), options.output)}")
        return
    if options.experiment == "prediction":
        with shown_progress(Console()) as progress:
            prediction.run(progress)
    written = prediction_tables.write if options.experiment == "prediction" else smollm2.write
    for path in written(options.output):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
