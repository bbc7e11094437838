"""`attnscale/policies/README.md` has one row for each policy, and each policy a YAML file."""

from __future__ import annotations

import re
from pathlib import Path

import attnscale.policies
from attnscale.policies import POLICIES

README = Path(attnscale.policies.__file__).parent / "README.md"
CONFIGS = Path(__file__).parents[2] / "configs" / "policy"


def rows(section: str) -> list[str]:
    """The names in the first column of the tables of a section."""
    text = re.search(rf"^#+ {re.escape(section)}.*?(?=^#+ \d|\Z)", README.read_text(encoding="utf-8"), re.M | re.S)
    assert text is not None, f"{README.name} has no section {section}"
    return re.findall(r"^\| `(\w+)` \|", text[0], re.M)


def test_every_policy_has_one_row() -> None:
    assert sorted(rows("2.1") + rows("2.2")) == sorted(POLICIES)


def test_every_policy_has_a_configuration() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(POLICIES)


def test_every_statistic_has_one_row() -> None:
    about = {"at_ceiling", "rows", "with_sink", "visible_given", "places", "heads"}  # metadata of the rows
    assert set(rows("1.")) == set(attnscale.RowStats._fields) - about


def test_sections_that_are_cited_exist() -> None:
    sections = set(re.findall(r"^#+ (\d(?:\.\d)?)\b", README.read_text(encoding="utf-8"), re.M))
    root = Path(__file__).parents[2]
    for folder in ("attnscale", "kernels", "tests"):
        for file in (root / folder).rglob("*.py"):
            for cited in re.findall(r"FORMULAS §(\d(?:\.\d)?)", file.read_text(encoding="utf-8")):
                assert cited in sections, f"{file} cites FORMULAS §{cited}"
