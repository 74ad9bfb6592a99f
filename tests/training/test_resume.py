"""Runs that stop early and resume: within an epoch, and after SIGKILL."""

from __future__ import annotations

import csv
import multiprocessing
import random
import time
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.errors import CheckpointError
from onnxtrain.optim import schedules
from onnxtrain.training import Callback, EarlyStopping, Run, StepResult, Trainer
from tests.artifacts.models import data, finished, graph, weight
from tests.training.test_fit import made, quiet
from tests.training.victim import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a net with BatchNormalization and Dropout, trained by AdamW with an average."""
    rng, op = np.random.default_rng(3), graph()
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4, 5])
    one, zero = np.ones(4, np.float32), np.zeros(4, np.float32)
    norm = {"n.weight": one, "n.bias": zero, "n.running_mean": zero, "n.running_var": one}
    h = op.BatchNormalization(x, *(weight(op, n, a) for n, a in norm.items()))
    h = op.Dropout(op.Flatten(h), op.const(0.3, ir.DataType.FLOAT))
    w = weight(op, "w", (rng.standard_normal((20, 3)) / 4).astype(np.float32))
    path = tmp_path_factory.mktemp("artifacts")
    build(
        finished(op, y=op.MatMul(h, w)),
        loss="mse",
        optimizer=optim.AdamW(lr=0.02),
        metrics=["mae"],
        ema=0.9,
    ).save(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without interruption."""
    path = tmp_path_factory.mktemp("whole")
    train(str(folder), str(path))
    return path


def check_same(a: Path, b: Path) -> None:
    """All bytes of the last checkpoint: weights, statistics, state, schedule, position."""
    assert (a / "end").read_bytes() == (b / "end").read_bytes()
    names = sorted(p.name for p in (a / "checkpoints").iterdir())
    assert names == sorted(p.name for p in (b / "checkpoints").iterdir())
    for name in names:
        assert (a / "checkpoints" / name).read_bytes() == (b / "checkpoints" / name).read_bytes()
    for name in ("metrics.csv", "metrics.jsonl"):
        assert (a / name).read_text() == (b / name).read_text()
    with open(a / "metrics.csv", newline="") as file:
        steps = [int(r["step"]) for r in csv.DictReader(file) if r["kind"] == "step"]
    assert steps == list(range(1, 40))


def kill_once(context: BaseContext, folder: Path, out: Path, delay: float) -> bool:
    """Start or resume the run and kill it after a while; return whether it was killed."""
    process = context.Process(target=train, args=(str(folder), str(out)))
    process.start()
    process.join(delay)
    killed = process.is_alive()
    process.kill()
    process.join()
    assert killed or process.exitcode == 0
    return killed


def check_readable(out: Path) -> None:
    for path in (out / "checkpoints").glob("*.safetensors"):
        tensors, meta = load_checkpoint(path)
        assert tensors.keys() >= {"w", "n.running_var", "optim/exp_avg/w", "optim/ema/w"}
        assert meta["run"]["epoch"] <= 3


def kill_until(kills: int, folder: Path, whole: Path, root: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    slow_to_import = ["onnxruntime", "matplotlib.figure", "matplotlib.backends.backend_agg"]
    context.set_forkserver_preload(["tests.training.victim", *slow_to_import])
    choose = random.Random(5)
    out, runs, done = root / "run0", 0, 0
    kill_once(context, folder, root / "warm-up", 600)  # starts the server, which takes longest
    started = time.perf_counter()
    kill_once(context, folder, root / "measured", 600)
    usual = time.perf_counter() - started
    while done < kills:
        if kill_once(context, folder, out, choose.uniform(0.0, usual)):
            done += 1
            check_readable(out)
        else:
            check_same(out, whole)
            runs += 1
            out = root / f"run{runs}"
    while kill_once(context, folder, out, 600):
        pytest.fail("the run hangs")
    check_same(out, whole)


def test_killed_runs_resume_to_the_same_bits(folder: Path, whole: Path, tmp_path: Path) -> None:
    kill_until(8, folder, whole, tmp_path)


@pytest.mark.full
def test_a_run_killed_a_hundred_times(folder: Path, whole: Path, tmp_path: Path) -> None:
    kill_until(100, folder, whole, tmp_path)


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Run, result: StepResult) -> None:
        if result.step == self.step:
            run.stop = "enough"


@pytest.mark.parametrize("step", [1, 4, 5, 13])
@pytest.mark.parametrize("layout", ["fused", "separate"])
def test_resume_from_every_step(folder: Path, tmp_path: Path, step: int, layout: str) -> None:
    """The schedule looks at validations, and patience counts epochs: both go on as well."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 4, 5)).astype(np.float32)
    pairs = (x, x[:, :3, 0].copy())

    def options() -> dict:
        return {
            "batch_size": 8,
            "validation": pairs,
            "schedule": schedules.ReduceOnPlateau(patience=0, threshold=0.5),
            "callbacks": [EarlyStopping(9, min_delta=0.1)],
        }

    whole = Trainer(folder, seed=2)
    expected = quiet(whole, pairs, epochs=4, **options())
    first = options()
    first["callbacks"].append(StopAt(step))
    quiet(Trainer(folder, seed=2, layout=layout), pairs, epochs=4, directory=tmp_path, **first)
    second = Trainer(folder)
    actual = quiet(second, pairs, epochs=4, directory=tmp_path, resume=True, **options())
    assert second.seed == 2
    assert (actual.losses, actual.epochs, actual.best) == (
        expected.losses,
        expected.epochs,
        expected.best,
    )
    assert [r["lr"] for r in actual.steps] == [r["lr"] for r in expected.steps]
    for name, value in whole.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], value, err_msg=name)


def test_more_epochs_later(tmp_path: Path) -> None:
    artifacts = made()
    whole = quiet(Trainer(artifacts), data(24), epochs=3, batch_size=8)
    quiet(Trainer(artifacts), data(24), epochs=1, batch_size=8, directory=tmp_path)
    more = quiet(
        Trainer(artifacts), data(24), epochs=3, batch_size=8, directory=tmp_path, resume=True
    )
    assert more.losses == whole.losses
    none = quiet(
        Trainer(artifacts), data(24), epochs=3, batch_size=8, directory=tmp_path, resume=True
    )
    assert none.losses == whole.losses


def test_resume_from_a_damaged_checkpoint(tmp_path: Path) -> None:
    artifacts = made()
    quiet(Trainer(artifacts), data(24), epochs=2, batch_size=8, directory=tmp_path)
    last = tmp_path / "checkpoints" / "step-000000006.safetensors"
    content = last.read_bytes()
    older = (tmp_path / "checkpoints" / "step-000000003.safetensors").read_bytes()
    for damaged in (content[:-5], content[:100], b"", content[:-9] + b"x" + content[-8:]):
        last.write_bytes(damaged)
        trainer = Trainer(artifacts)
        before = trainer.state_dict()
        with pytest.raises(CheckpointError, match="step-000000006"):
            quiet(trainer, data(24), epochs=4, batch_size=8, directory=tmp_path, resume=True)
        after = trainer.state_dict()
        assert all(np.array_equal(before[n], after[n]) for n in before)
    last.unlink()
    assert (tmp_path / "checkpoints" / "step-000000003.safetensors").read_bytes() == older
    whole = quiet(Trainer(artifacts), data(24), epochs=4, batch_size=8)
    rest = quiet(
        Trainer(artifacts), data(24), epochs=4, batch_size=8, directory=tmp_path, resume=True
    )
    assert rest.losses == whole.losses


def test_a_checkpoint_without_a_run(tmp_path: Path) -> None:
    artifacts = made()
    trainer = Trainer(artifacts)
    trainer.step(*data(8))
    (tmp_path / "checkpoints").mkdir()
    trainer.save(tmp_path / "checkpoints" / "step-000000001.safetensors")
    with pytest.raises(CheckpointError, match="not a checkpoint of a run: 'run'"):
        quiet(Trainer(artifacts), data(24), epochs=4, directory=tmp_path, resume=True)
