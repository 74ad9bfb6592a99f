"""Predictions of ``plan`` against measured runs, and its answers about a budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import onnxtrain
from onnxtrain.cli.main import app
from onnxtrain.errors import OnnxTrainError, PrepareError
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.planning.memory_plan import read_memory, read_tokens
from tests.losses.small import weight

MB = 2**20
WIDE = 256
CODE = """
import json, sys
import numpy as np
from onnxtrain.training import Trainer
with np.load(sys.argv[2]) as file:
    arrays = dict(file)
trainer = Trainer(sys.argv[1], threads=1)
for _ in range(3):
    trainer.step(**arrays)
status = open("/proc/self/status").read().splitlines()
print(next(int(x.split()[1]) for x in status if x.startswith("VmHWM")) * 1024)
"""


def layers(count: int = 4) -> ir.Model:
    """Return wide layers whose activations are most of the memory at a large batch."""
    rng = np.random.default_rng(0)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="layers")
    op = OpBuilder(graph)
    x = op.input("x", ir.DataType.FLOAT, ["batch", WIDE])
    for i in range(count):
        w = rng.standard_normal((WIDE, WIDE)).astype(np.float32) / 16
        x = op.Tanh(op.Add(op.MatMul(x, weight(op, f"w{i}", w)), 0.5))
    x.name = "y"
    graph.outputs.append(x)
    return ir.Model(graph, ir_version=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned")
    onnxtrain.build(layers(), loss="mse", optimizer="adamw", check=False).save(path / "out")
    ir.save(layers(), path / "model.onnx")
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no way to measure")
def test_the_peak_is_what_a_fresh_process_takes(folder: Path) -> None:
    size = 40_000
    x = np.zeros((size, WIDE), np.float32)
    np.savez(folder / "batch.npz", x=x, target=x)
    run = [sys.executable, "-c", CODE, str(folder / "out"), str(folder / "batch.npz")]
    measured = int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    predicted = onnxtrain.plan(folder / "out", batch=size)
    assert predicted.parts["activations"] > 100 * MB
    assert predicted.peak == pytest.approx(measured, rel=0.2)


def test_more_samples_take_more_and_parts_add_up() -> None:
    few, many = (onnxtrain.plan(layers(), loss="mse", batch=n) for n in (10, 10_000))
    assert few.peak == sum(few.parts.values())
    assert many.parts["trained weights"] == few.parts["trained weights"] == 4 * WIDE * WIDE * 4
    assert many.parts["optimizer state"] == 2 * many.parts["trained weights"]
    grown = many.parts["activations"] - few.parts["activations"]
    assert grown >= 4 * 9_990 * WIDE * 4  # the backward pass reads the result of every layer


def test_a_budget_that_is_too_small_is_refused_with_what_would_do() -> None:
    plan = onnxtrain.plan(layers(), loss="mse", batch=100_000, memory="400MB")
    assert not plan.fits
    smaller = [w for w in plan.ways if "accumulate" in w.name]
    assert smaller
    assert smaller[0].peak <= 400e6
    with pytest.raises(OnnxTrainError, match=r"more than 400 MB\nhint: .*accumulate"):
        plan.check()
    nothing = onnxtrain.plan(layers(), loss="mse", batch=1000, memory="1MB")
    with pytest.raises(OnnxTrainError, match=r"at least .* are needed"):
        nothing.check()


def test_a_budget_that_is_large_enough_is_accepted() -> None:
    plan = onnxtrain.plan(layers(), loss="mse", batch=10, memory="8GB")
    assert plan.fits
    plan.check()
    assert "fits 8 GB" in str(plan)


def test_the_command_prints_parts_and_fails_beyond_the_budget(folder: Path) -> None:
    model = str(folder / "model.onnx")
    good = CliRunner().invoke(app, ["plan", model, "--loss", "mse", "--batch", "8", "--json"])
    assert good.exit_code == 0, good.output
    report = json.loads(good.output)
    assert report["sizes"] == {"batch": 8}
    assert report["peak"] == sum(report["parts"].values())
    bad = CliRunner().invoke(app, ["plan", str(folder / "out"), "--batch", "8", "--memory", "1MB"])
    assert bad.exit_code == 1
    assert isinstance(bad.exception, OnnxTrainError)


def test_sizes_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(PrepareError, match="unknown dimension: height"):
        onnxtrain.plan(layers(), loss="mse", sizes={"height": 3})


@pytest.mark.parametrize("text", ["", "0GB", "many", "2TBx"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(PrepareError, match="not an amount"):
        read_memory(text)


@pytest.mark.parametrize("text", ["", "4", "0x4", "4x", "axb"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(PrepareError, match="not a number of tokens"):
        read_tokens(text)
