"""Progress without a terminal: lines on stderr, often at first, then one per minute."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from attnscale.cli.parser import INTERVAL, ProgressLines, shown_progress


def test_lines_become_rarer_up_to_one_per_interval(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = ProgressLines(lambda: now)
    for second in range(600):
        now = float(second)
        progress(second, 600, "cell")
    times = [int(line.partition("/")[0]) for line in capsys.readouterr().err.splitlines()]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert waits[0] < 10
    assert waits == sorted(waits)
    assert waits[-1] == INTERVAL


def test_files_get_lines_and_terminals_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(Console(file=io.StringIO())) as progress:
        progress(0, 3, "first, about 2 min left")
    assert capsys.readouterr().err == "0/3: first, about 2 min left\n"
    screen = io.StringIO()
    with shown_progress(Console(file=screen, force_terminal=True, width=100)) as progress:
        progress(1, 3, "a [cell]")
    assert "a [cell]" in screen.getvalue()
    assert capsys.readouterr().err == ""
