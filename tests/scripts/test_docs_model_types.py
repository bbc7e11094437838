"""The table of transformers model types on the documentation site: complete, and what `inspect` finds today."""

from __future__ import annotations

import re

import pytest

from scripts.docs import model_types
from scripts.docs.sources import ROOT

transformers = pytest.importorskip("transformers")

ROWS = {row.model_type: row for row in model_types.read_table()}

# At least one type for each verdict, small enough to be built quickly.
SAMPLE = ("bert", "gpt2", "llama", "gptj", "bloom", "mamba", "gpt_oss", "longt5", "t5", "whisper", "gemma3n", "hy_v4")


def test_the_table_is_of_the_pinned_version() -> None:
    pinned = re.search(r"^transformers==(\S+)", (ROOT / "scripts/constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert model_types.version() == pinned[1]


def test_the_table_has_every_type() -> None:
    if transformers.__version__ != model_types.version():
        pytest.skip(f"transformers {transformers.__version__} is not the version of the table")
    assert list(ROWS) == list(model_types.classes())


def test_the_sample_has_every_verdict() -> None:
    assert {ROWS[name].verdict for name in SAMPLE} == set(model_types.VERDICTS)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_inspect_finds(name: str) -> None:
    assert model_types.inspect_type(name) == ROWS[name]


def test_types_that_tests_apply_a_policy_to_are_not_refused() -> None:
    zoo = model_types._zoo()
    assert {name for name, row in ROWS.items() if row.tested} == set(zoo) & set(ROWS)
    refused = [name for name in zoo if name in ROWS and ROWS[name].verdict not in ("supported", "scales already")]
    assert refused == []


def test_the_page_shows_every_type_once() -> None:
    text, _ = model_types.section()
    for name in ROWS:
        assert text.count(f"\n| `{name}` | `") == 1
