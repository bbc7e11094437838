"""The embedded model and its text."""

from __future__ import annotations

import pytest

from attnscale.lab.inputs import ModelFolder, Text

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def prose() -> Text:
    return Text.read(None, ModelFolder.at("embedded", "float32").tokenizer())


@pytest.fixture
def model():
    return ModelFolder.at("embedded", "float32").load()
