"""A model with a trained length of 64 tokens in a folder, and a text for it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    from scripts.training.embedded import build_model, save_byte_tokenizer

    path = tmp_path_factory.mktemp("models") / "tiny"
    build_model(64, seed=3).save_pretrained(path)
    save_byte_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    from scripts.training.embedded import read_text

    path = tmp_path / "text.txt"
    path.write_bytes(bytes(read_text("held_out")[:6000].tolist()))
    return path
