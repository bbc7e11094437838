"""What `import attnscale` leaves out of the diagnostics, and that every name is there when it is used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnscale.diagnostics
import attnscale.diagnostics.sinks


def test_the_import_brings_nothing_that_only_a_program_with_a_monitor_needs():
    code = """
import sys, attnscale
sys.stdout.write(' '.join(name for name in sys.modules if name.startswith('attnscale.diagnostics')))
assert attnscale.Monitor is attnscale.diagnostics.Monitor and attnscale.observe is attnscale.diagnostics.observe
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert run.stdout.split() == []


@pytest.mark.parametrize("package", [attnscale.diagnostics, attnscale.diagnostics.sinks])
def test_every_name_is_found_when_it_is_used(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name


def test_names_that_are_imported_later_are_listed_now():
    assert {"Monitor", "observe"} <= set(dir(attnscale))
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        _ = attnscale.Missing


def test_an_observation_is_no_longer_called_an_inspection():
    with pytest.raises(AttributeError, match=r"attnscale\.diagnostics\.Observation"):
        _ = attnscale.diagnostics.Inspection


def test_a_sink_is_added_by_one_file(tmp_path):
    """A copy of the package with one more module in `sinks`."""
    others = shutil.ignore_patterns("__pycache__", "configs", "embedded", "assets")
    shutil.copytree(Path(attnscale.__file__).parent, tmp_path / "attnscale", ignore=others)
    sink = "class NewSink:\n    def log(self, records, step): ...\n    def close(self): ...\n"
    (tmp_path / "attnscale/diagnostics/sinks/new.py").write_text(sink)
    code = "from attnscale.diagnostics import *; assert isinstance(NewSink(), Sink); print(NewSink.__module__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, check=True, text=True, cwd=tmp_path, env=environment)
    assert run.stdout.strip() == "attnscale.diagnostics.sinks.new"
