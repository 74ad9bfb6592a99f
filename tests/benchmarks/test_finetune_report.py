"""The section on fine-tuning in a tab."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.web.finetune_report import TITLE, section, write_section

ROW = {
    "threads": 1,
    "seconds": 2.0,
    "tokens": 64.0,
    "memory": 950.0,
    "off": 2e-5,
    "frame": 18.0,
    "ready": 9.0,
    "token": 0.4,
}
FOUND = {
    "browser": "1.2",
    "cores": 2,
    "cpu": "a CPU",
    "load": 0.1,
    "loadAfter": 0.2,
    "started": "2026-01-02T03:04:05Z",
    "decoder": [ROW],
    "encoder": {
        "examples": 24,
        "classes": 3,
        "seconds": 70.0,
        "ready": 5.0,
        "steps": 16,
        "accuracy": 0.75,
        "tested": 48,
    },
}


def test_aims_are_judged() -> None:
    text = section(FOUND)
    assert "| 64 | 40: met | 950 | 900: missed | 2.0e-05, aim 0.001: met |" in text
    assert "70 s from nothing to a classifier (aim 60: missed)" in text
    assert "75 % of 48 other texts" in text


def test_a_section_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("# Page\n\n## One\n\ntext\n")
    results.write_text(json.dumps(FOUND))
    write_section(results, page)
    first = page.read_text()
    assert first.startswith("# Page\n\n## One\n\ntext\n\n## Fine-tuning in a tab\n")
    page.write_text(first + "\n## Last\n\nend\n")
    results.write_text(json.dumps({**FOUND, "browser": "9.9"}))
    write_section(results, page)
    text = page.read_text()
    assert text.count(TITLE) == 1
    assert "Chromium 9.9" in text
    assert text.endswith("\n## Last\n\nend\n")
