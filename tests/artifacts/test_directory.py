"""Directories of artifacts: file names, contents, reproducible bytes, damaged files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import CheckpointError, SaveError
from onnxtrain.manifest import Manifest
from onnxtrain.training import Trainer

from .models import data, example, with_norm

FILES = {
    "training_model.onnx",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "step_model.onnx",
    "inference_model.onnx",
    "checkpoint",
    "manifest.json",
}


def schema() -> dict:
    text = resources.files("onnxtrain").joinpath("manifest.schema.json").read_text()
    return json.loads(text)


@pytest.fixture(scope="module")
def artifacts() -> Artifacts:
    return example()


@pytest.fixture
def folder(artifacts: Artifacts, tmp_path: Path) -> Path:
    artifacts.save(tmp_path)
    return tmp_path


def test_files(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == FILES | {"weights.bin"}
    manifest = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(manifest, schema(), jsonschema.Draft202012Validator)
    for model in manifest["models"]:
        digest = hashlib.sha256((folder / model["file"]).read_bytes()).hexdigest()
        assert model["sha256"] == digest
        proto = onnx.load(folder / model["file"], load_external_data=False)
        assert [i["name"] for i in model["inputs"]] == [i.name for i in proto.graph.input]
        assert [o["name"] for o in model["outputs"]] == [o.name for o in proto.graph.output]
        assert {n.domain for n in proto.graph.node} == {""}
        assert proto.ir_version == 10
        (entry,) = proto.metadata_props
        inner = json.loads(entry.value)
        jsonschema.validate(inner, schema(), jsonschema.Draft202012Validator)
        assert inner["models"] == [{**model, "sha256": ""}]
        assert Manifest.from_json(entry.value).loss == manifest["loss"]
        known = {p["name"] for p in inner["parameters"]} | {s["name"] for s in inner["state"]}
        assert {t["name"] for t in model["inputs"] if t["role"] in ("parameter", "state")} <= known
    assert manifest["files"].keys() == {"weights.bin"}


def test_frozen_weights_are_stored_once(folder: Path) -> None:
    """fc1.weight has 2,560 bytes: only the inference model contains it."""
    assert (folder / "weights.bin").stat().st_size == 40 * 16 * 4
    for name in ("training_model.onnx", "eval_model.onnx", "step_model.onnx"):
        proto = onnx.load(folder / name, load_external_data=False)
        (frozen,) = (t for t in proto.graph.initializer if t.name == "fc1.weight")
        assert frozen.data_location == onnx.TensorProto.EXTERNAL
        assert "fc1.weight" not in {i.name for i in proto.graph.input}


def test_no_weights_file_without_frozen_weights(tmp_path: Path) -> None:
    build(with_norm(), loss="mse", optimizer="sgd").save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FILES | {"gradient_model.onnx"}


def test_prefix(artifacts: Artifacts, tmp_path: Path) -> None:
    artifacts.save(tmp_path, prefix="net_")
    assert {p.name for p in tmp_path.iterdir()} == {f"net_{n}" for n in FILES | {"weights.bin"}}
    loaded = Artifacts.load(tmp_path, prefix="net_")
    x, labels = data(8, features=40)
    assert Trainer(loaded).step(x, labels).loss == Trainer(artifacts).step(x, labels).loss


def test_the_current_folder(
    artifacts: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    artifacts.save(".")
    loaded = Artifacts.load(".")
    assert loaded.values.keys() == artifacts.values.keys()
    for name, values in artifacts.values.items():
        np.testing.assert_array_equal(loaded.values[name], values)


def test_saving_twice_gives_equal_bytes(folder: Path, tmp_path: Path) -> None:
    Artifacts.load(folder).save(tmp_path / "again")
    for path in folder.iterdir():
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_checkpoint_is_plain_safetensors(folder: Path) -> None:
    tensors = load_file(folder / "checkpoint")
    assert {"fc1.bias", "fc2.weight", "optim/exp_avg/fc2.weight", "optim/ema/fc2.bias"} <= set(
        tensors
    )
    np.testing.assert_array_equal(tensors["optim/ema/fc2.bias"], tensors["fc2.bias"])


def test_trained_weights_are_written_by_overwriting_bytes(folder: Path) -> None:
    """As browsers export: without a protobuf library, by offsets."""
    trainer = Trainer(folder)
    x, labels = data(16, features=40)
    for _ in range(3):
        trainer.step(x, labels)
    content = bytearray((folder / "inference_model.onnx").read_bytes())
    for weight in trainer.manifest.parameters:
        (place,) = weight.locations
        assert place.file == "inference_model.onnx"
        new = trainer.parameters[weight.name].tobytes()
        assert len(new) == place.nbytes
        content[place.offset : place.offset + place.nbytes] = new
    session = onnxruntime.InferenceSession(bytes(content))
    scores, _ = session.run(None, {"x": x})
    np.testing.assert_array_equal(scores, trainer.predict(x=x)["scores"])


def test_builds_are_byte_identical(folder: Path, tmp_path: Path) -> None:
    """Including builds in a process with another hash seed."""
    script = "import sys; from tests.artifacts.models import example; example().save(sys.argv[1])"
    other = tmp_path / "other"
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "src")))
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": path}
    subprocess.run(
        [sys.executable, "-c", script, str(other)], check=True, env=environment, cwd=tmp_path
    )
    for name in FILES | {"weights.bin"}:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


# -- damage -----------------------------------------------------------------------------

ALL = sorted(FILES | {"weights.bin"})


@pytest.mark.parametrize("name", ALL)
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"^{name}: cannot be read"):
        Artifacts.load(folder)


@pytest.mark.parametrize("name", ALL)
def test_flipped_byte(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    spaces = b" \n" if name == "manifest.json" else b""
    places = [i for i in range(0, len(content), len(content) // 23) if content[i] not in spaces]
    for at in places:
        damaged = bytearray(content)
        damaged[at] ^= 0x04
        (folder / name).write_bytes(damaged)
        # A damaged manifest may make the check of another file fail.
        with pytest.raises(CheckpointError, match=None if name == "manifest.json" else name):
            Artifacts.load(folder)
    (folder / name).write_bytes(content)
    Artifacts.load(folder)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated(folder: Path, name: str, share: float) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=name):
        Artifacts.load(folder)


def edit(folder: Path, change: str) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    exec(change, {"m": data})
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("m['format'] = 2", r"format 2, this version reads 1\n.*hint"),
        ("del m['format']", "format None"),
        ("del m['models']", "'models' is missing"),
        ("m['models'] = {}", "models: expected a list"),
        ("m['models'][0]['role'] = 'fly'", "unknown model role 'fly'"),
        ("m['models'][0]['file'] = '../x'", "file name '../x' is not plain"),
        ("m['models'][0]['inputs'][0]['role'] = 'x'", "unknown role 'x'"),
        ("m['models'][0]['inputs'][0]['shape'] = [1.5]", "has the wrong type"),
        ("m['models'][0]['outputs'][-1]['feeds'] = 'q'", "feeds 'q', not an input"),
        ("m['surprise'] = 1", "unknown entries: surprise"),
        ("m['accumulate'] = True", "has the wrong type"),
        ("m['parameters'][0]['shape'] = [7]", "'fc1.bias' has shape"),
        ("m['parameters'][0]['dtype'] = 'float64'", "is float32, expected float64"),
        ("m['state'][0]['slot'] = 'speed'", "'optim/speed/fc1.bias' is missing"),
    ],
)
def test_wrong_manifest(folder: Path, change: str, message: str) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        Artifacts.load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", "[" * 100_000])
def test_invalid_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"^manifest.json: "):
        Artifacts.load(folder)


def test_checkpoint_of_other_artifacts(folder: Path, tmp_path: Path) -> None:
    other = build(with_norm(), loss="mse", optimizer="sgd")
    (folder / "checkpoint").write_bytes(other.checkpoint_bytes())
    with pytest.raises(CheckpointError, match="checkpoint does not fit these artifacts"):
        Artifacts.load(folder)


def test_checkpoint_may_be_replaced_by_a_trained_one(folder: Path) -> None:
    trainer = Trainer(folder)
    x, labels = data(16, features=40)
    trainer.step(x, labels)
    trainer.save(folder / "checkpoint")
    again = Trainer(folder)
    assert again.global_step == 1
    assert again.step(x, labels).loss == trainer.step(x, labels).loss


def test_models_may_not_read_outside_files(folder: Path) -> None:
    """Even if the manifest has the digest of the changed model."""
    (folder.parent / "secret").write_bytes(b"x" * 40 * 16 * 4)
    path = folder / "eval_model.onnx"
    proto = onnx.load(path, load_external_data=False)
    (frozen,) = (t for t in proto.graph.initializer if t.name == "fc1.weight")
    frozen.external_data[0].value = "../secret"
    path.write_bytes(proto.SerializeToString())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(folder, f"m['models'][1]['sha256'] = '{digest}'")
    message = r"^eval_model\.onnx: tensor 'fc1\.weight' is in the file '\.\./secret'"
    with pytest.raises(CheckpointError, match=message):
        Artifacts.load(folder)
    path.write_bytes(b"nothing")
    digest = hashlib.sha256(b"nothing").hexdigest()
    edit(folder, f"m['models'][1]['sha256'] = '{digest}'")
    with pytest.raises(CheckpointError, match=r"^eval_model\.onnx: not an ONNX model"):
        Artifacts.load(folder)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^manifest.json: cannot be read"):
        Artifacts.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError):
        Artifacts.load(tmp_path / "file")


def test_failed_save_leaves_the_old_directory(
    folder: Path, artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        artifacts.save(folder)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    shutil.rmtree(folder)


def test_a_save_over_trained_weights_is_refused(tmp_path: Path) -> None:
    example().save(tmp_path)
    example().save(tmp_path)  # nothing is lost: untrained
    trainer = Trainer(tmp_path)
    trainer.step(*data(4, 40))
    trainer.save(tmp_path / "checkpoint")
    trained = (tmp_path / "checkpoint").read_bytes()
    refused = r"has trained weights: checkpoint is of step 1\nhint: force=True replaces them"
    with pytest.raises(SaveError, match=refused):
        example().save(tmp_path)
    assert (tmp_path / "checkpoint").read_bytes() == trained
    Artifacts.load(tmp_path).save(tmp_path)  # these artifacts are the trained ones
    example().save(tmp_path, force=True)
    assert Trainer(tmp_path).global_step == 0
    Trainer(tmp_path).fit(data(4, 40), directory=tmp_path / "run", progress=False)
    with pytest.raises(SaveError, match="run has checkpoints"):  # of a run that was killed
        example().save(tmp_path)
