"""Shared set-up of the tests with transformers models."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

# transformers is not there for Python 3.10.
collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="session")
def stock_folder(tmp_path_factory):
    """A small Llama without a policy, as save_pretrained writes it."""
    from tiny_models import llama  # needs transformers

    folder = tmp_path_factory.mktemp("stock")
    llama().float().save_pretrained(folder)
    return folder


@pytest.fixture
def softmax_in_fp64(monkeypatch):
    """Eager attention rounds its weights to fp32 whatever the model computes in: not while it is the yardstick."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, **_: torch.softmax(scores, dim))
