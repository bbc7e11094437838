"""Names of `attnscale.theory` that have moved say where they went."""

from __future__ import annotations

import importlib

import pytest

import attnscale.theory


@pytest.mark.parametrize("name", attnscale.theory._MOVED)
def test_a_module_that_moved_names_the_one_that_has_it(name):
    with pytest.raises(AttributeError, match=rf"attnscale\.theory\.{attnscale.theory._MOVED[name]}"):
        getattr(attnscale.theory, name)
    importlib.import_module(f"attnscale.theory.{attnscale.theory._MOVED[name]}")
