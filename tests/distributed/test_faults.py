"""Workers that differ, stop, compute NaN, never come, or are killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.errors import MissingExtraError, OnnxTrainError
from onnxtrain.training import distributed
from tests.training.made import same

from . import nets
from .pool import Pool

TASKS = "tests.distributed.nets."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    nets.artifacts("mlp").save(folder / "art")
    nets.artifacts("mlp", everything=True).save(folder / "other")
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seed", "seed: 1 on worker 1, 0 on worker 0"),
        ("artifacts", "manifest: sha256"),
        ("versions", "onnxruntime: 1.0 on worker 1"),
        ("data", "rows of the data: 49 on worker 1, 50 on worker 0"),
        ("options", "batch_size: 21 on worker 1, 20 on worker 0"),
    ],
)
def test_workers_that_differ_are_refused_by_all(
    what: str, message: str, folder: Path, pool: Pool
) -> None:
    for error in pool.run(2, TASKS + "differing", str(folder), what):
        assert isinstance(error, OnnxTrainError)
        assert message in str(error)


def test_nan_on_one_worker_skips_the_step_on_all(folder: Path, pool: Pool) -> None:
    first, last = pool.run(2, TASKS + "nan_on_one", str(folder))
    for losses, updated, unchanged, _ in (first, last):
        assert updated == [True, False, True]
        assert np.isnan(losses[1])
        assert unchanged
    assert first[0][0] == last[0][0]
    assert first[3] == "the loss of step 3 is not finite on worker 1"
    assert "is nan" in last[3]


def test_callbacks_run_on_one_worker_and_stop_all(folder: Path, pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, TASKS + "stopping", str(folder), str(tmp_path))
    # The others hear of it with the next batch.
    assert first == (5, "enough", ["step"] * 5)
    assert second == (5, "enough", [])
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["best.safetensors", "step-000000003.safetensors", "step-000000005.safetensors"]


def test_batches_of_an_iterable_are_cut_and_those_of_a_sampler_are_not(
    folder: Path, pool: Pool
) -> None:
    (one,) = pool.run(1, TASKS + "of_batches", str(folder), "whole")
    assert len(one) == 3
    for losses in pool.run(2, TASKS + "of_batches", str(folder), "whole"):
        np.testing.assert_allclose(losses, one, rtol=1e-6)
    # torch deals rows out in turn; with 16 of 48 rows in a step, the batches are the same sets.
    for losses in pool.run(2, TASKS + "of_batches", str(folder), "split"):
        np.testing.assert_allclose(losses, one, rtol=1e-6)


def test_a_killed_worker_ends_the_others_and_the_run_continues(
    folder: Path, tmp_path: Path
) -> None:
    pool = Pool(2)
    try:
        (whole, _) = pool.run(2, TASKS + "resumable", str(folder), str(tmp_path / "a"), 0.0)
        pool.start(2, TASKS + "resumable", str(folder), str(tmp_path / "b"), 0.05)
        while not list((tmp_path / "b").glob("checkpoints/step-*")):
            time.sleep(0.01)
        os.kill(pool.processes[1].pid, signal.SIGKILL)
        error = pool.result(0, 10)
        assert isinstance(error, OnnxTrainError)
        assert "worker 0 of 2 lost worker 1" in str(error)
    finally:
        pool.close()
    again = Pool(2)
    try:
        (resumed, _) = again.run(2, TASKS + "resumable", str(folder), str(tmp_path / "b"), 0.0)
    finally:
        again.close()
    same(resumed, whole)


def test_a_group_that_never_forms_names_who_is_missing(folder: Path, pool: Pool) -> None:
    for rank, error in enumerate(pool.run(2, TASKS + "never", str(folder))):
        assert f"worker {rank} of 3 waited 1 s" in str(error)
    assert "for worker 2" in str(error)


def test_without_torch_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingExtraError, match=r"onnxtrain\[torch"):
        distributed.join("auto", "cpu")


def test_without_a_launcher_a_trainer_is_alone(folder: Path) -> None:
    assert distributed.join("auto", "cpu") is None
    with pytest.raises(OnnxTrainError, match="torchrun --nproc-per-node"):
        distributed.join(True, "cpu")
    with pytest.raises(OnnxTrainError, match="unknown distributed: 'ddp'"):
        distributed.join("ddp", "cpu")
