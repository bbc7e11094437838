"""A small experiment with the interface of those in `attnscale.lab`, and its output folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnscale.errors import reject

RESULTS = "task,metric,model,policy,length,bin,value,low,high,difference,difference_low,difference_high,samples"
STATISTICS = "task,model,policy,length,layer,head,rows,visible,beta,w_max,entropy," + ",".join(
    f"accumulation_{rank}{suffix}" for suffix in ("", "_without_first") for rank in (2, 8, 16)
)


@dataclass(frozen=True)
class Small:
    """What is run.

    Args:
        models: Folders of models.
        output: Folder to write.
        policies: Laws, of which
            100% are run.
        lengths: Lengths of the contexts.
        text: File with text.
        trained_length: Length that the model was trained at.
        windows: Pieces of text.
        rate: Of learning.
        shuffled: In any order.
        dtype: Of the weights.
    """

    models: tuple[str, ...]
    output: str
    policies: tuple[str, ...] = ("constant", "log")
    lengths: tuple[int, ...] = (128, 256)
    text: str | None = None
    trained_length: int | None = None
    windows: int = 8
    rate: float = 0.5
    shuffled: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.windows < 1:
            reject("windows", self.windows, "an int >= 1")


@dataclass(frozen=True)
class SmallCalibration:
    """What is calibrated.

    Args:
        model: Folder of a model.
        to: Length to reach.
        output: Folder to write.
    """

    model: str
    to: int
    output: str


def run(experiment: Small, progress: Callable[[int, int, str], None]) -> Path:
    """Write a folder as an evaluation does, with easily checked numbers."""
    progress(1, 2, "half [of] it")
    return write_folder(Path(experiment.output), experiment.policies, experiment.lengths)


def write_folder(
    folder: Path,
    policies: tuple[str, ...],
    lengths: tuple[int, ...],
    tasks: tuple[str, ...] = ("perplexity", "multi_needle"),
) -> Path:
    """Accuracy 0.5 ± 0.01, 2.25 bits per byte, and two heads with w_max 0.2 and 0.4."""
    results, statistics = [RESULTS], [f"{STATISTICS},criticality"]
    for task in tasks:
        metric, value = ("bits_per_byte", 2.25) if task == "perplexity" else ("accuracy", 0.5)
        for policy in policies:
            for length in lengths:
                interval = f"{value},{value - 0.0196},{value + 0.0196},,,,8"
                results += [f"{task},{metric},{model},{policy},{length},,{interval}" for model in ("a", "all")]
                results.append(f"{task},{metric},all,{policy},{length},0.0-0.2,0.9,0.9,0.9,,,,8")
                for head, weight in enumerate((0.2, 0.4)):
                    numbers = f"64,{length},1.0,{weight},3.5,1,0.8,3,4,5,6,1.25"
                    statistics.append(f"{task},a,{policy},{length},model.layers.0,{head},{numbers}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.csv").write_text("\n".join(results) + "\n")
    (folder / "statistics.csv").write_text("\n".join(statistics) + "\n")
    return folder
