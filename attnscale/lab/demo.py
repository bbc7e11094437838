"""The demonstration: the embedded model under the five laws, from its trained length to 128 times that."""

from __future__ import annotations

from pathlib import Path

from attnscale.lab.evaluation import Evaluation, Progress, evaluate
from attnscale.lab.models import EMBEDDED

POLICIES = ("constant", "sqrt_log", "log", "log_squared", "gap_adaptive=gap_adaptive:r=4")


def demo_evaluation(output: str | Path, quick: bool = False) -> Evaluation:
    """What the demonstration measures; `quick` ends at 16 times the trained length."""
    return Evaluation(
        models=(EMBEDDED,),
        output=str(output),
        policies=POLICIES,
        lengths=(128, 512, 2048) if quick else (128, 512, 2048, 8192, 16384),
        windows=2 if quick else 4,
        samples=2 if quick else 4,
        asked=64,
        needles_every=32,
    )


def run(output: str | Path = "demo", progress: Progress | None = None, quick: bool = False) -> Path:
    """Evaluate the embedded model into a folder, which is returned."""
    return evaluate(demo_evaluation(output, quick), progress)
