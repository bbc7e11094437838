"""What a missing package gets: the command that installs it, although attnscale is on no index."""

from __future__ import annotations

import importlib.metadata

import pytest

from attnscale._util.optional import install_command, need
from attnscale.errors import MissingDependencyError

DECLARED = [
    "torch>=2.13",
    'rich; extra == "cli"',
    'jsonargparse>=4.53; extra == "cli"',
    "lm-eval[hf,ruler]>=0.4.13; python_version >= '3.11' and extra == 'eval'",
    'click; extra == "client"',
]


def test_the_command_names_the_packages_of_the_extra_as_a_shell_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: DECLARED)
    assert install_command("cli") == "pip install rich 'jsonargparse>=4.53'"
    assert install_command("eval") == "pip install 'lm-eval[hf,ruler]>=0.4.13'"
    with pytest.raises(MissingDependencyError, match=r"^a test needs nothing_like_it: pip install rich 'jsonargparse"):
        need("nothing_like_it.part", "a test", "cli")


def test_a_clone_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert install_command("hf") == "pip install '.[hf]' in the attnscale repository"
