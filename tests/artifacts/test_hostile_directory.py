"""Untrusted directories: models that reference other files, and names that are not files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto

from onnxtrain import build, load, losses
from onnxtrain.artifacts import Artifacts
from onnxtrain.checkpoint import load_checkpoint
from onnxtrain.checkpoint.ort_checkpoint import read_odtc
from onnxtrain.errors import CheckpointError, LoadError, SaveError
from onnxtrain.graph.io import save
from onnxtrain.training import Trainer

from .models import classifier, example

STEP = "step_model.onnx"


@pytest.fixture(scope="module")
def artifacts() -> Artifacts:
    return example()


@pytest.fixture(scope="module")
def plain() -> Artifacts:
    """Artifacts whose optimizer updates one vector."""
    loss = [losses.LossTerm("cross_entropy", output="scores")]
    return build(classifier(), loss=loss, optimizer="adamw")


@pytest.fixture
def folder(artifacts: Artifacts, tmp_path: Path) -> Path:
    artifacts.save(tmp_path / "art")
    return tmp_path / "art"


def sign(folder: Path) -> None:
    """Update the sha256 of all files in the manifest."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for model in manifest["models"]:
        model["sha256"] = hashlib.sha256((folder / model["file"]).read_bytes()).hexdigest()
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


def change(folder: Path, edit: Callable[[onnx.ModelProto], object]) -> None:
    proto = onnx.load(folder / STEP, load_external_data=False)
    edit(proto)
    (folder / STEP).write_bytes(proto.SerializeToString())
    sign(folder)


def external(location: str, name: str = "leak", **more: str) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def sparse(values: TensorProto, indices: TensorProto | None = None) -> onnx.SparseTensorProto:
    indices = indices or TensorProto(data_type=TensorProto.INT64, dims=[1], int64_data=[0])
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[1])


def bare_branch(tensor: TensorProto) -> onnx.GraphProto:
    """A subgraph without nodes, whose output is an initializer."""
    output = onnx.ValueInfoProto(name=tensor.name)
    return onnx.GraphProto(name="branch", output=[output], initializer=[tensor])


def node(op_type: str, *attributes: AttributeProto) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=op_type, output=["leaked"], attribute=attributes)


def branches(tensor: TensorProto) -> onnx.NodeProto:
    graph = bare_branch(tensor)
    names = ("then_branch", "else_branch")
    return node("If", *(AttributeProto(name=n, type=AttributeProto.GRAPH, g=graph) for n in names))


def value(tensor: TensorProto) -> AttributeProto:
    return AttributeProto(name="value", type=AttributeProto.TENSOR, t=tensor)


def sparse_value(tensor: TensorProto) -> AttributeProto:
    kind = AttributeProto.SPARSE_TENSOR
    return AttributeProto(name="sparse_value", type=kind, sparse_tensor=sparse(tensor))


PLACES: dict[str, Callable[[onnx.ModelProto, TensorProto], object]] = {
    "initializer": lambda m, t: m.graph.initializer.append(t),
    "sparse values": lambda m, t: m.graph.sparse_initializer.append(sparse(t)),
    "sparse indices": lambda m, t: m.graph.sparse_initializer.append(sparse(t, t)),
    "branch without nodes": lambda m, t: m.graph.node.append(branches(t)),
    "attribute": lambda m, t: m.graph.node.append(node("Constant", value(t))),
    "sparse attribute": lambda m, t: m.graph.node.append(node("Constant", sparse_value(t))),
    "function": lambda m, t: m.functions.append(
        onnx.FunctionProto(name="F", domain="own", node=[node("Constant", value(t))])
    ),
    "default of a function": lambda m, t: m.functions.append(
        onnx.FunctionProto(name="F", domain="own", attribute_proto=[value(t)])
    ),
    "training graph": lambda m, t: m.training_info.append(
        onnx.TrainingInfoProto(algorithm=bare_branch(t))
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["hard.bin", "../secret.bin", "/etc/hostname", "link.bin"])
def test_no_file_but_the_weights(folder: Path, place: str, location: str) -> None:
    secret = folder.parent / "secret.bin"
    secret.write_bytes(np.float32(1234.5).tobytes())
    os.link(secret, folder / "hard.bin")
    (folder / "link.bin").symlink_to(secret)
    change(folder, lambda m: PLACES[place](m, external(location)))
    message = f"^step_model.onnx: tensor 'leak' is in the file '{location}', which is not part of"
    with pytest.raises(CheckpointError, match=message):
        Artifacts.load(folder)


def replaced_by(kind: str, folder: Path) -> None:
    path = folder / "weights.bin"
    outside = folder.parent / "outside.bin"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    if kind == "hard link":
        os.link(outside, path)
    else:
        path.symlink_to(outside)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("hard link", "several hard links"), ("symlink", "behind a symbolic link")],
)
def test_weights_are_a_file_of_the_directory(folder: Path, kind: str, message: str) -> None:
    replaced_by(kind, folder)
    with pytest.raises(CheckpointError, match=rf"_model\.onnx: external data .*{message}"):
        Artifacts.load(folder)


@pytest.mark.parametrize("place", PLACES)
def test_ranges_are_checked_everywhere(folder: Path, place: str) -> None:
    far = external("weights.bin", offset="1000000")
    change(folder, lambda m: PLACES[place](m, far))
    with pytest.raises(CheckpointError, match="external data that does not fit its file"):
        Artifacts.load(folder)


def test_weights_have_a_digest(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {}
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"^weights\.bin: the manifest has no sha256 for this"
    ):
        Artifacts.load(folder)


@pytest.mark.parametrize("place", PLACES)
def test_models_are_not_saved_without_their_data(tmp_path: Path, place: str) -> None:
    model = onnx.ModelProto(ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=21)])
    PLACES[place](model, external("weights.bin"))
    with pytest.raises(SaveError, match="refers to external data: 'leak'"):
        save(model, tmp_path / "m.onnx")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {
    pipe: "not a regular file but a pipe, a device or a socket",
    endless: "not a regular file but a pipe, a device or a socket",
    Path.mkdir: "this is a directory",
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", STEP, "weights.bin", "checkpoint"])
def test_special_file_in_a_directory(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(CheckpointError, match=f"^{name}: cannot be read: {KINDS[make]}\nhint"):
        Artifacts.load(folder)


@pytest.mark.parametrize("make", KINDS)
def test_special_file_as_checkpoint(
    artifacts: Artifacts, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "there"
    make(path)
    trainer = Trainer(artifacts)
    for read in (trainer.load, trainer.load_weights, load_checkpoint, read_odtc):
        with pytest.raises(CheckpointError, match=f"there': cannot be read: {KINDS[make]}$"):
            read(path)
    with pytest.raises(LoadError, match=r"directory, not a model|not a regular file"):
        load(path)


def test_name_with_a_nul(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: not a file name"):
        load_checkpoint("a\0b")


def roles(role: str) -> Callable[[Any], list[Any]]:
    """Find the inputs of a role in all models of a manifest."""
    return lambda m: [t for model in m["models"] for t in model["inputs"] if t["role"] == role]


DAMAGE: dict[str, Callable[[Any], object]] = {
    "an unknown dtype of the learning rate": lambda m: [
        t.update(dtype="float") for t in roles("lr")(m)
    ],
    "a symbolic learning rate": lambda m: [t.update(shape=["n"]) for t in roles("lr")(m)],
    "strings as learning rate": lambda m: [t.update(dtype="string") for t in roles("lr")(m)],
    "no state": lambda m: m["state"].clear(),
    "state of one slot": lambda m: m["state"].pop(),
    "state of another parameter": lambda m: m["state"][0].update(parameter="w"),
    "a parameter that an update reads": lambda m: m["parameters"].pop(),
    "a renamed parameter": lambda m: m["parameters"][0].update(name="weight"),
    "a huge parameter": lambda m: m["parameters"][0].update(shape=[2**40, 2**20]),
    "updates without parameters": lambda m: [
        model.update(members=[]) for model in m["models"] if model["role"] == "update"
    ],
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_entries_of_the_manifest(plain: Artifacts, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "art"
    plain.save(folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    assert any(model["role"] == "update" for model in manifest["models"])
    DAMAGE[what](manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        Trainer(folder)


def test_an_inference_model_with_names_that_are_not_text(plain: Artifacts, tmp_path: Path) -> None:
    folder = tmp_path / "art"
    plain.save(folder)
    name = "inference_model.onnx"
    data = (folder / name).read_bytes()
    proto = onnx.load(folder / name, load_external_data=False)
    old = proto.graph.node[0].output[0].encode()
    (folder / name).write_bytes(data.replace(old, b"\xf4" * len(old)))
    sign(folder)
    with pytest.raises(CheckpointError, match=r"inference_model\.onnx: not a valid model"):
        Trainer(folder).predict(np.ones((4, 6), np.float32))
