"""The page on fine-tuning has the figures of the stored runs, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.finetuning import page

ROW = {
    "model": "tiny",
    "threads": 1,
    "engine": "onnxtrain",
    "ms": 12.4,
    "ratio": 0.5,
    "tokens": 99.6,
    "peak_mb": 7.0,
    "memory": 1.0,
}
RUN = {"command": "python -m it", "where": "here", "rows": [ROW]}


def test_the_page_shows_the_stored_runs() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    runs = json.loads(page.RESULTS.read_text())
    assert page.rendered(text, runs) == text
    outside = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    assert re.findall(r"^\|.*\d.*\|$", outside, re.MULTILINE) == []


def test_a_run_takes_the_place_of_that_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PAGE", "RESULTS"):
        copy = tmp_path / getattr(page, name).name
        copy.write_bytes(getattr(page, name).read_bytes())
        monkeypatch.setattr(page, name, copy)
    before = json.loads(page.RESULTS.read_text())
    page.write("cuda", RUN)
    text = page.PAGE.read_text(encoding="utf-8")
    assert "`python -m it`, here:\n" in text
    assert "| tiny | 1 | onnxtrain | 12 | 0.50 | 100 | 7 | 1.00 |" in text
    assert page.table(before["cpu"]) in text
    assert page.table(before["cuda"]) not in text
