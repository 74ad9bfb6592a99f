"""Checkpoints go from Python to C++, to Node and back; models that C++ exports run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.checkpoint import to_bytes
from tests.artifacts.test_half_files import batch, mlp
from tests.cpp import nets
from tests.cpp.ort_root import ROOT
from tests.cpp.programs import driver, need, run, web_package
from tests.training.test_batch_of_one import built

STEPS = 10


def trained(folder: Path, rows: list[dict[str, np.ndarray]], path: Path) -> onnxtrain.Trainer:
    trainer = onnxtrain.Trainer(folder, seed=5, threads=1, layout="fused")
    for row in rows[:STEPS]:
        trainer.step(**row)
    trainer.properties.update(
        {"note": 'grüße "\\\n\x7f 🙂', "ratio": 1.0, "tiny": 1e-7, "n": 2**53}
    )
    trainer.lr = 0.0001234
    trainer.save(path)
    return trainer


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_same_bytes(tmp_path: Path, name: str) -> None:
    """What C++ reads and writes again is the same file; after equal steps, too."""
    folder = nets.artifacts(name, tmp_path / "artifacts")
    rows = nets.batches(name, tmp_path / "batches")
    trainer = trained(folder, rows, tmp_path / "python")
    run(driver(), "copy", folder, tmp_path / "python", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "python").read_bytes()
    places = (tmp_path / "losses", tmp_path / "cpp", tmp_path / "python")
    run(driver(), "train", folder, tmp_path / "batches", STEPS, *places)
    for row in rows[:STEPS]:
        trainer.step(**row)
    trainer.save(tmp_path / "python")
    assert (tmp_path / "cpp").read_bytes() == (tmp_path / "python").read_bytes()


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_python_cpp_node_python(tmp_path: Path, name: str) -> None:
    need("node", "npm")
    web_package()
    folder = nets.artifacts(name, tmp_path / "artifacts")
    rows = nets.batches(name, tmp_path / "batches")
    straight = trained(folder, rows, tmp_path / "python")
    cpp, node = tmp_path / "cpp", tmp_path / "node"
    batches = tmp_path / "batches"
    run(driver(), "train", folder, batches, STEPS, tmp_path / "losses", cpp, tmp_path / "python")
    run("node", ROOT / "tests/cpp/exchange.mjs", folder, batches, cpp, STEPS, node)
    back = onnxtrain.Trainer(folder, threads=1)
    back.load(node)
    assert back.global_step == 3 * STEPS
    assert back.seed == 5
    assert back.properties == straight.properties
    for _ in range(2):
        for row in rows[:STEPS]:
            straight.step(**row)
    # Node has another build of the runtime.
    for key, array in straight.state_dict().items():
        np.testing.assert_allclose(back.state_dict()[key], array, rtol=2e-4, atol=2e-6, err_msg=key)
    assert back.step(**rows[0]).loss == pytest.approx(straight.step(**rows[0]).loss, rel=1e-4)


@pytest.mark.parametrize("ema", [False, True])
def test_export(tmp_path: Path, ema: bool) -> None:
    folder = nets.artifacts("transformer", tmp_path / "artifacts")
    rows = nets.batches("transformer", tmp_path / "batches")
    trainer = trained(folder, rows, tmp_path / "saved")
    model = tmp_path / "model.onnx"
    run(driver(), "export", folder, tmp_path / "saved", model, *(["ema"] if ema else []))
    trainer.export(tmp_path / "expected.onnx", ema=ema)
    feeds = {"tokens": rows[0]["tokens"]}
    ours, expected = (
        onnxruntime.InferenceSession(path).run(None, feeds)[0]
        for path in (model, tmp_path / "expected.onnx")
    )
    np.testing.assert_array_equal(ours, expected)
    if not ema:
        np.testing.assert_array_equal(ours, trainer.predict(**feeds)["logits"])


def test_refusals_say_what_and_where(tmp_path: Path) -> None:
    folder = nets.artifacts("mlp", tmp_path / "artifacts")
    nets.batches("mlp", tmp_path / "batches")
    nets.batches("transformer", tmp_path / "tokens")
    places = (10, tmp_path / "losses", tmp_path / "saved")
    error = run(driver(), "train", folder, tmp_path / "tokens", *places, fails=True)
    assert error == "unknown input: 'tokens'\nhint: the inputs are x, labels\n"
    error = run(driver(), "train", tmp_path / "no", tmp_path / "batches", *places, fails=True)
    assert error.startswith("manifest.json: not found")
    error = run(driver(), "copy", folder, tmp_path / "batches", tmp_path / "out", fails=True)
    assert "a safetensors file without training progress" in error
    model = folder / "step_model.onnx"
    model.write_bytes(model.read_bytes() + b"\0")
    error = run(driver(), "train", folder, tmp_path / "batches", *places, fails=True)
    assert error.startswith("step_model.onnx: sha256 does not match the manifest")
    assert not (tmp_path / "saved").exists()


def test_a_file_of_16_bits_is_exported_in_16_bits(tmp_path: Path) -> None:
    """Its parameters train in float32; rounded to the nearest, they are the bytes of Python."""
    folder = tmp_path / "artifacts"
    onnxtrain.build(mlp("float16"), loss="mse", optimizer="adamw").save(folder)
    trainer = onnxtrain.Trainer(folder, threads=1)
    for _ in range(STEPS):
        trainer.step(*batch())
    trainer.save(tmp_path / "saved")
    run(driver(), "export", folder, tmp_path / "saved", tmp_path / "model.onnx")
    trainer.export(tmp_path / "expected.onnx")
    actual, expected = (
        {t.name: t.raw_data for t in onnx.load(tmp_path / name).graph.initializer}
        for name in ("model.onnx", "expected.onnx")
    )
    assert len(actual["w1"]) == 8 * 24 * 2
    assert actual == expected


def test_a_batch_of_one_leaves_nothing_to_normalise(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"
    built("batch, 3").save(folder)
    row = np.ones((1, 3), np.float32)
    (tmp_path / "batches").write_bytes(to_bytes({"0/x": row, "0/target": row}, {}))
    places = (1, tmp_path / "losses", tmp_path / "saved")
    error = run(driver(), "train", folder, tmp_path / "batches", *places, fails=True)
    assert "BatchNormalization needs more than one value per channel in training" in error
    assert not (tmp_path / "saved").exists()
