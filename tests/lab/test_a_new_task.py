"""A new task is one class in `TASKS`; tables, page, charts and command line use it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

import torch
from rich.console import Console
from small_evaluation import rows, small

from attnscale.cli.show import show_evaluation
from attnscale.lab.evaluation import evaluate
from attnscale.lab.sequences import Retrieval
from attnscale.lab.tasks import TASKS, RetrievalTask
from attnscale.report import read_evaluation
from attnscale.report.verdict import verdict


@dataclass(frozen=True)
class Copy(RetrievalTask):
    """A piece of the text, and then the same again."""

    asked: int

    name = "copy"
    title = "Accuracy, copy"

    def content(self, length, text):
        return {"text": text.digest, "asked": self.asked}

    def sequence(self, key, text, generator):
        half = key["length"] // 2
        start = int(torch.randint(len(text.tokens) - half, (1,), generator=generator))
        places = half + torch.arange(1, 1 + self.asked)
        return Retrieval(text.tokens[start : start + half].repeat(2), places[:, None], (places - half) / key["length"])


def test_a_class_in_the_list_of_tasks_is_evaluated_tabulated_and_shown(folder, text, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, Copy.name, Copy)
    output = evaluate(small(folder, text, tmp_path / "out", tasks=("perplexity", "copy"), samples=2))
    (row,) = rows(output, task="copy", metric="accuracy", policy="log", length=256, bin="")
    assert row["samples"] == "2"
    assert rows(output, "statistics.csv", task="copy", policy="log", length=256)
    assert "acc,none" in json.loads((output / "lm_eval" / "results_log.json").read_text())["results"]["copy_256"]
    assert "answers" in verdict(read_evaluation(output)).sentences[0]
    console = Console(width=100, file=io.StringIO())
    show_evaluation(console, output, report=True)
    assert console.file.getvalue().lstrip().startswith("copy")
    page = (output / "report.html").read_text(encoding="utf-8")
    assert all(part in page for part in ("Accuracy, copy", "copy against bits per byte", "copy, accuracy", "log, copy"))
    assert (output / "accuracy.png").is_file()
