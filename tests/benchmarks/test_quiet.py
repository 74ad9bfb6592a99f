"""A page is written only from a run on an otherwise idle machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.measure import Cell

from benchmarks import __main__ as bench
from benchmarks import growth, page, quiet
from tests.benchmarks.test_report import cell, timed

MACHINE = {
    "date": "today",
    "commit": "abc",
    "command": "python -m benchmarks",
    "cores": 2,
    "cpu": "a",
    "memory_gb": 1.0,
    "system": "Linux",
    "load_before": [0.1, 0.2, 0.3],
}


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- benchmark -->\nold\n<!-- /benchmark -->\n")
    monkeypatch.setattr(page.write, "__defaults__", ("benchmark", path))
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    return path


def report(folder: Path, monkeypatch: pytest.MonkeyPatch, *others: float) -> None:
    row = cell(onnxtrain=timed(0.003), torch=timed(0.004))
    results = {"machine": {**MACHINE, "others": list(others)}, "clock": "wall"}
    results["cells"] = [row.to_json()]
    (folder / "run.json").write_text(json.dumps(results))
    monkeypatch.setattr("sys.argv", ["benchmarks", "--report", str(folder / "run.json")])
    bench.main()


def test_a_quiet_run_is_written_and_stored(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(tmp_path, monkeypatch, 0.02, 0.05)
    assert "other processes took 3.5% of the machine" in target.read_text()
    stored = json.loads((tmp_path / "results" / "cpu.json").read_text())
    assert page.generated(stored) in target.read_text()


def test_a_busy_run_leaves_the_page_as_it_is(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="other processes took 30% of the machine"):
        report(tmp_path, monkeypatch, 0.1, 0.5)
    assert "\nold\n" in target.read_text()
    assert not (tmp_path / "results").exists()


def test_a_run_for_a_page_does_not_begin_beside_other_work() -> None:
    with pytest.raises(SystemExit, match="other work takes 70% of the machine"):
        quiet.begin(strict=True, sample=lambda: 0.7, patience=0.0)
    assert quiet.begin(strict=False, sample=lambda: 0.7, patience=0.0) == [0.7]
    parts = iter([0.9, 0.5, 0.01])
    assert quiet.begin(strict=True, sample=lambda: next(parts)) == [0.01]


def test_ticks_of_all_cores(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 1 4 80 5 1 2 7 3 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert quiet._ticks(stat) == (25, 110)


def test_a_sample_is_a_part() -> None:
    assert 0.0 <= quiet.others(0.05) <= 1.0


@pytest.mark.parametrize("name", ["cpu", "growth"])
def test_the_page_shows_the_stored_run(name: str) -> None:
    run = json.loads((page.RESULTS / f"{name}.json").read_text())
    cells = [Cell.from_json(c) for c in run["cells"]]
    text = {
        "cpu": lambda: page.generated(run),
        "growth": lambda: growth.text(cells, run["skipped"], run["machine"], run["threads"]),
    }[name]()
    assert not quiet.busy(run["machine"])
    assert text in page.PAGE.read_text(encoding="utf-8")
