"""Train models from a YAML file, and evaluate max retrieval: `python -m scripts.training FILE key=value …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from attnscale.cli.evaluate import Experiments, read_experiment
from attnscale.cli.parser import shown_progress
from attnscale.errors import AttnScaleError

EXPERIMENTS: Experiments = {
    "attention_loss": ("scripts.training.attention_loss", "AttentionLossRuns", "run"),
    "max_retrieval": ("scripts.training.max_retrieval", "MaxRetrieval", "run"),
    "training": ("scripts.training.embedded", "Training", "run"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 2 for an invalid file or value."""
    parser = argparse.ArgumentParser(prog="python -m scripts.training", description=__doc__)
    parser.add_argument(
        "file", type=Path, metavar="FILE", help=f"YAML with the key `experiment`: {', '.join(EXPERIMENTS)}"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a value of the file; lists: [0,1]")
    options = parser.parse_args(arguments)
    try:
        experiment, function = read_experiment(options.file, options.overrides, EXPERIMENTS)
        with shown_progress(Console()) as progress:
            written = function(experiment, progress=progress)
    except AttnScaleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
