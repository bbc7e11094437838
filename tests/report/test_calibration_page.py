"""The page of a calibration in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

from browser_page import browser, opened
from small_calibration import small

from attnscale.lab.calibration import calibrate
from attnscale.report.calibration_page import build_calibration_page, read_calibration

SECTIONS = ["verdict", "growth", "criticality", "held_out", "heads", "reproduce"]


@browser
def test_all_sections_are_there_in_order_without_an_error(tmp_path: Path) -> None:
    data = read_calibration(calibrate(small(tmp_path / "embedded")))
    page = build_calibration_page(data)
    dom = opened(tmp_path, page)
    assert [found["id"] for found in dom.all("section")] == SECTIONS
    assert "hidden" in dom.by_id("failure")
    assert "model.layers.1.self_attn head" in dom.text["verdict"]
    assert re.findall(r"\bnan\b|\bNaN\b|\binf\b|Infinity", page[: page.index('id="content"')]) == []
