"""What `import attnscale` leaves out of the diagnostics, and that every name is there when it is used."""

from __future__ import annotations

import subprocess
import sys

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
