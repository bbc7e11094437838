"""Shared set-up of the tests with transformers' models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def softmax_in_fp64(monkeypatch):
    """Eager attention rounds its weights to fp32 whatever the model computes in: not while it is the yardstick."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, **_: torch.softmax(scores, dim))
