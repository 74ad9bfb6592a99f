"""External data that `load` must reject."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from onnxtrain.graph.io import Limits, load
from tests.graph import small_models as small
from tests.graph.refusals import first_line, refusal
from tests.graph.small_models import make_external, parse

F = onnx.TensorProto
MISMATCH = "tensor data that does not match dtype and shape"

RANGE = "external data that does not fit its file"
OUTSIDE = "external data outside the model's directory"
ABSOLUTE = "external data with an absolute path"
ENTRIES: dict[str, tuple[dict[str, object], str]] = {
    "absolute": ({"location": "/etc/passwd"}, ABSOLUTE),
    "absolute on windows": ({"location": "C:\\w.bin"}, ABSOLUTE),
    "network share": ({"location": "\\\\host\\w.bin"}, ABSOLUTE),
    "traversal": ({"location": "../secret.bin"}, OUTSIDE),
    "traversal inside": ({"location": "sub/../../secret.bin"}, OUTSIDE),
    "traversal on windows": ({"location": "..\\secret.bin"}, OUTSIDE),
    "traversal that comes back": ({"location": "../model/w.bin"}, OUTSIDE),
    "symbolic link": ({"location": "link.bin"}, "external data behind a symbolic link"),
    "link inside": ({"location": "inner.bin"}, "external data behind a symbolic link"),
    "linked directory": ({"location": "folder/secret.bin"}, "external data behind a symbolic link"),
    "hard link": ({"location": "hard.bin"}, "external data in a file with several hard links"),
    "directory": ({"location": "sub"}, "external data that is not a regular file"),
    "pipe": ({"location": "pipe"}, "external data that is not a regular file"),
    "nothing": ({"location": "."}, "external data that is not a regular file"),
    "missing": ({"location": "no.bin"}, "external data files that are missing"),
    "file as directory": ({"location": "w.bin/x"}, "external data files that are missing"),
    "no location": ({"offset": 0}, "invalid external data entries"),
    "unknown key": (
        {"location": "w.bin", "__class__": "x"},
        "invalid external data entries",
    ),
    "memory": (
        {"location": "*/_ORT_MEM_ADDR_/*", "offset": 140210, "length": 12},
        "tensors that refer to memory of another process",
    ),
    "negative offset": ({"location": "w.bin", "offset": -4}, RANGE),
    "offset not a number": ({"location": "w.bin", "offset": "0x0"}, RANGE),
    "offset in other digits": ({"location": "w.bin", "offset": "\u0664"}, RANGE),
    "length not a number": ({"location": "w.bin", "length": "12.0"}, RANGE),
    "negative length": ({"location": "w.bin", "length": -12}, RANGE),
    "offset beyond the end": ({"location": "w.bin", "offset": 8}, RANGE),
    "huge offset": ({"location": "w.bin", "offset": 2**63 - 1}, RANGE),
    "truncated": ({"location": "short.bin"}, RANGE),
    "empty file": ({"location": "empty.bin"}, RANGE),
    "length": (
        {"location": "w.bin", "length": 8},
        "external data whose length does not match dtype and shape",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model directory with a valid data file and files that must not be opened."""
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "w.bin").write_bytes(bytes(16))
    (folder / "short.bin").write_bytes(bytes(11))
    (folder / "empty.bin").write_bytes(b"")
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "inner.bin").symlink_to(folder / "w.bin")
    (folder / "folder").symlink_to(tmp_path)
    (folder / "hard.bin").hardlink_to(tmp_path / "secret.bin")
    os.mkfifo(folder / "pipe")
    return folder


Place = Callable[[onnx.ModelProto], onnx.TensorProto]


def in_constant(model: onnx.ModelProto) -> onnx.TensorProto:
    node = model.graph.node.add(op_type="Constant", output=["c1"])
    return node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t


def in_tensors(model: onnx.ModelProto) -> onnx.TensorProto:
    node = model.graph.node.add(op_type="Thing", output=["c1"])
    return node.attribute.add(name="values", type=onnx.AttributeProto.TENSORS).tensors.add()


def in_subgraph(model: onnx.ModelProto) -> onnx.TensorProto:
    model.CopyFrom(parse(small.BRANCHES))
    return model.graph.node[1].attribute[0].g.initializer.add(name="deep")


def in_function(model: onnx.ModelProto) -> onnx.TensorProto:
    model.CopyFrom(parse(small.FUNCTION))
    attribute = model.functions[0].node[0].attribute[0]
    attribute.ClearField("f")
    attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
    return attribute.t


def in_function_default(model: onnx.ModelProto) -> onnx.TensorProto:
    model.CopyFrom(parse(small.FUNCTION))
    default = model.functions[0].attribute_proto.add(name="p", type=onnx.AttributeProto.TENSOR)
    return default.t


PLACES: dict[str, Place] = {
    "initializer": lambda m: m.graph.initializer.add(name="outside"),
    "constant": in_constant,
    "list of tensors": in_tensors,
    "subgraph": in_subgraph,
    "function": in_function,
    "default of a function": in_function_default,
}


def external(place: str, entries: dict[str, object]) -> onnx.ModelProto:
    model = parse(small.LINEAR)
    tensor = PLACES[place](model)
    tensor.data_type = F.FLOAT
    tensor.dims.append(3)
    make_external(tensor, **entries)
    return model


@pytest.mark.parametrize("name", ENTRIES)
def test_external_data(name: str, folder: Path) -> None:
    entries, headline = ENTRIES[name]
    for place in ("initializer", "constant"):
        path = folder / "model.onnx"
        path.write_bytes(external(place, entries).SerializeToString())
        text = refusal(path, folder.parent)
        assert first_line(text) == f"{str(path)!r}: {headline}"


@pytest.mark.parametrize("place", PLACES)
def test_external_data_in_attributes_and_functions(place: str, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(external(place, {"location": "w.bin"}).SerializeToString())
    for tensor in external_tensors(load(path)):
        assert not isinstance(tensor, ir.ExternalTensor)
    path.write_bytes(external(place, {"location": "../secret.bin"}).SerializeToString())
    assert first_line(refusal(path, folder.parent)).endswith(OUTSIDE)


def external_tensors(model: ir.Model) -> list[object]:
    tensors: list[object] = [v.const_value for v in model.graph.initializers.values()]
    for holder in (*model.graph.all_nodes(), *model.functions.values()):
        tensors += [a.value for a in holder.attributes.values()]
    return tensors


@pytest.mark.parametrize("place", PLACES)
def test_external_data_without_a_path(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)  # where the file would be found
    model = external(place, {"location": "w.bin"})
    headline = "external data in a model that was not loaded from a path"
    assert first_line(refusal(model, folder.parent)) == f"ModelProto: {headline}"
    assert first_line(refusal(model.SerializeToString(), folder.parent)) == f"bytes: {headline}"
    text = refusal(ir.from_proto(model), folder.parent)
    assert first_line(text) == "ir.Model: external data without a base directory"


def test_external_data_of_an_ir_model(folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(external("initializer", {"location": "folder/secret.bin"}).SerializeToString())
    text = refusal(ir.load(path), folder.parent)
    assert first_line(text) == "ir.Model: external data behind a symbolic link"


def test_external_data_over_the_size_limit(folder: Path) -> None:
    model = external("initializer", {"location": "w.bin"})
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    (folder / "w.bin").write_bytes(bytes(10_000))
    text = refusal(path, folder.parent, limits=Limits(file_bytes=1_000))
    assert first_line(text) == f"{str(path)!r}: external data files over the size limit"


def test_duplicate_external_data_key(folder: Path) -> None:
    model = external("initializer", {"location": "w.bin"})
    tensor = model.graph.initializer[1]
    tensor.external_data.add(key="location", value="w.bin")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    assert "duplicate key 'location'" in refusal(path, folder.parent)
    del tensor.external_data[1:]
    tensor.raw_data = bytes(12)
    path.write_bytes(model.SerializeToString())
    assert first_line(refusal(path, folder.parent)).endswith(MISMATCH)
