"""What `import attnscale` brings along of the diagnostics, and that every name is there when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import attnscale.diagnostics
import attnscale.diagnostics.sinks

HEAVY = (
    "autograd",
    "listener",
    "records.collect",
    "records.distributed",
    "sinks.console",
    "sinks.jsonl",
    "sinks.tensorboard",
    "views.heatmap",
)


def test_the_import_brings_only_what_a_program_without_a_monitor_needs():
    code = "import sys, attnscale; sys.stdout.write(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    loaded = run.stdout.split()
    assert "attnscale.diagnostics" in loaded
    assert [name for name in HEAVY if f"attnscale.diagnostics.{name}" in loaded] == []


@pytest.mark.parametrize("package", [attnscale.diagnostics, attnscale.diagnostics.sinks])
def test_every_name_is_found_when_it_is_used(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        _ = package.Missing
