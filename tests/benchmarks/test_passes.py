"""Measuring passes on whole steps: what is turned off, and what counts as an effect."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.pass_nets import NETS

from benchmarks import passes
from onnxtrain import targets, thresholds
from onnxtrain.errors import OnnxTrainError
from onnxtrain.optimize import pipeline


def entries() -> list[str]:
    lists = (pipeline.BEFORE, pipeline.AFTER, pipeline.FINAL)
    return [p.rewrite.__name__ for entries in lists for p in entries]


def test_passes_preferences_and_thresholds_are_turned_off_and_on_again() -> None:
    before = entries()
    with passes.without(passes.Switch("pass", "fuse_swish_grad"), "cpu"):
        assert "fuse_swish_grad" not in entries()
    with passes.without(passes.Switch("preference", "means-as-matmul"), "cpu"):
        assert not targets.find("cpu").prefers("means-as-matmul")
    value = thresholds.UNROLLED_TAPS
    with passes.without(passes.Switch("threshold", "UNROLLED_TAPS"), "cpu"):
        assert thresholds.UNROLLED_TAPS == 0
    assert entries() == before
    assert targets.find("cpu").prefers("means-as-matmul")
    assert value == thresholds.UNROLLED_TAPS


def test_ten_nets_for_each_target() -> None:
    assert all(len(nets) >= 10 for nets in NETS.values())


def test_every_switch_has_a_name_of_its_own() -> None:
    for target in NETS:
        names = [s.name for s in passes.switches(target)]
        assert len(names) == len(set(names))


def test_builds_that_differ_are_measured(tmp_path: Path) -> None:
    net = NETS["cpu"]["mlp"]
    path = net.export(tmp_path)
    base = passes.build(net.name, path, "cpu", None, str(tmp_path))
    switch = passes.Switch("pass", "expand_label_losses")
    assert switch in base.used
    other = passes.build(net.name, path, "cpu", switch, str(tmp_path))
    assert other.digest != base.digest
    (times,) = passes.compare(net, base.folder, [other.folder], "cpu", 1)
    row = times.row("cpu")
    assert row["low"] == row["ratio"] == row["high"] > 0


@pytest.mark.parametrize(
    ("low", "high", "effect"), [(0.9, 0.99, -1), (0.9, 1.0, 0), (0.99, 1.1, 0), (1.01, 1.1, 1)]
)
def test_an_effect_is_on_one_side_in_all_repetitions(low: float, high: float, effect: int) -> None:
    assert passes.effect({"low": low, "high": high}) == effect


def test_a_build_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = NETS["cpu"]["mlp"]
    path = net.export(tmp_path)
    base = passes.build(net.name, path, "cpu", None, str(tmp_path))
    broken = passes.build(net.name, path, "cpu", passes.Switch("itself", "other"), str(tmp_path))
    runner = passes.Runner

    def fail(net: passes.AnyNet, folder: str, target: str, *, weigh: bool) -> passes.Runner:
        if folder == broken.folder:
            raise OnnxTrainError("no kernel\nhint: none")
        return runner(net, folder, target, weigh=weigh)

    monkeypatch.setattr(passes, "Runner", fail)
    (times,) = passes.compare(net, base.folder, [broken.folder], "cpu", 2)
    assert times.row("cpu") == {"changes": True, "fails": "no kernel"}
