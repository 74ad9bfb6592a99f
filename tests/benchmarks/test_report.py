"""Tables from synthetic cells."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.measure import Cell, Timing, judge

from benchmarks import page, plan, report

LOSSES = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]


def timed(*wall: float, peak: float = 10.0, losses: list[float] | None = None) -> Timing:
    facts = {
        "losses": losses or LOSSES,
        "session_s": 0.5,
        "first_steps_s": 0.25,
        "peak_mb": peak,
        "versions": {"engine": "1"},
    }
    return Timing(facts=facts, wall=list(wall), cpu=[2 * w for w in wall])


def cell(**engines: Timing) -> Cell:
    return Cell("mlp", "sgd", 1, {n.replace("_", "-"): t for n, t in engines.items()})


def test_a_fast_wrong_answer_is_not_timed() -> None:
    engines = {
        "onnxtrain": timed(),
        "torch": timed(),
        "onnxsim": timed(losses=[2.0] * 6),
        "ort-training": Timing("refused", "no gradient for Foo"),
    }
    judge(engines)
    assert [engines[n].status for n in engines] == ["timed", "timed", "wrong", "refused"]
    assert "loss of step 2 is 2.00000 instead of 1.90000" in engines["onnxsim"].reason


def test_our_own_wrong_answer_is_not_timed_either() -> None:
    engines = {"onnxtrain": timed(losses=[2.0] * 6), "torch": timed()}
    judge(engines)
    assert engines["onnxtrain"].status == "wrong"


def test_nothing_is_timed_if_the_loss_stands_still() -> None:
    engines = {"onnxtrain": timed(losses=[2.0] * 6), "torch": timed(losses=[2.0] * 6)}
    judge(engines)
    assert all(t.status == "wrong" and "hardly moves" in t.reason for t in engines.values())


def test_ratio_table_says_met_missed_and_refused() -> None:
    row = cell(
        onnxtrain=timed(0.001, 0.001, 0.001),
        torch=timed(0.004, 0.004, 0.002),
        compile=timed(0.002, 0.002, 0.002),
        ort_training=Timing("refused", "no gradient"),
        onnxsim=Timing("wrong", "loss of step 2"),
    )
    text = report.ratio_table([row], "wall")
    assert "| 0.25 (0.25-0.50), <= 0.45 met |" in text
    assert "0.50 (0.50-0.50), <= 0.45 **missed by 11%** |" in text
    assert text.rstrip().endswith("| refused | wrong |")
    assert report.missed(row, "wall")
    assert report.summary([row], "wall") == {"met": 1, "missed": ["mlp sgd 1t / compile"]}


def test_no_ratio_without_a_time_of_ours() -> None:
    row = cell(onnxtrain=Timing("wrong", "loss"), torch=timed(0.001))
    assert report.ratio(row, "torch", "wall") is None
    assert "no time of ours" in report.ratio_table([row], "wall")
    assert not report.missed(row, "wall")


def test_processor_time_is_the_other_clock() -> None:
    row = cell(onnxtrain=timed(0.001), torch=timed(0.004))
    assert report.milliseconds(row.engines["onnxtrain"], "cpu").startswith("2.000")


def test_memory_is_held_against_torch() -> None:
    text = report.memory_table([cell(onnxtrain=timed(1.0, peak=30), torch=timed(1.0, peak=20))])
    assert "| 30 | 20 | 1.50 missed by 50% |" in text


def test_refusals_are_told_once_with_their_rows() -> None:
    rows = [cell(onnxtrain=timed(1.0), onnxsim=Timing("refused", "no <rule> | x")) for _ in "ab"]
    text = report.refusals(rows)
    assert text == "- onnxsim loop, refused: no (rule) / x (mlp sgd 1t, mlp sgd 1t)"


def test_cells_survive_a_file() -> None:
    row = cell(onnxtrain=timed(1.0), onnxsim=Timing("refused", "why"))
    assert Cell.from_json(row.to_json()) == row


def test_a_page_keeps_the_text_around_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- growth -->\nold\n<!-- /growth -->\nafter\n")
    page.write("new", "growth", path)
    page.write("newer", "growth", path)
    assert path.read_text() == "before\n<!-- growth -->\nnewer\n<!-- /growth -->\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        page.write("new", "other", path)


def test_the_page_has_its_markers() -> None:
    text = page.PAGE.read_text()
    for name in ("benchmark", "growth", "gradients"):
        assert all(text.count(mark) == 1 for mark in page.markers(name))


def test_the_whole_page() -> None:
    row = cell(onnxtrain=timed(0.003), torch=timed(0.004), onnxsim=Timing("refused", "why"))
    machine = {
        "date": "today",
        "commit": "abc",
        "command": "python -m benchmarks",
        "cores": 2,
        "cpu": "a processor",
        "memory_gb": 1.0,
        "system": "Linux",
        "load_before": [0.1, 0.2, 0.3],
        "others": [0.01, 0.03],
    }
    rows = [{"op": "MatMul", "ms": 1.0, "part": 0.5, "calls": 2}]
    profiles = [{"workload": "mlp", "optimizer": "sgd", "threads": 1, "rows": rows}]
    results = {
        "machine": machine,
        "clock": "wall",
        "cells": [row.to_json()],
        "profiles": profiles,
    }
    text = page.generated(results)
    assert "0 of 1 targets with a time on both sides are met; missed: mlp sgd 1t / torch." in text
    assert "MatMul 1.00 ms (50%)" in text
    assert "- onnxsim loop, refused: why (mlp sgd 1t)" in text
    assert "do not quote" not in text
    assert "other processes took 2.0% of the machine, at most 3.0% (2 samples)" in text
    machine["others"] = [0.01, 0.4]
    assert "do not quote these ratios" in page.generated(results)


def test_compile_without_a_target_runs_with_sgd_only() -> None:
    tasks = plan.tasks(["mlp", "vit"], ["sgd", "adamw"], [1], ["onnxtrain", "compile"])
    assert [(t.workload, t.optimizer) for t in tasks if "compile" not in t.peers] == [
        ("vit", "adamw")
    ]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="no such workload: nothing; there are mlp"):
        plan.chosen(["nothing"], ["mlp"], "workload")
