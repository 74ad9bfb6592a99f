"""Files that `load` must reject with a precise error, fast and without side effects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxtrain.graph.io import Limits, load
from tests.graph import small_models as small
from tests.graph.refusals import first_line, refusal
from tests.graph.small_models import make_external, parse, with_raw_weight

Mutation = Callable[[onnx.ModelProto], object]
F = onnx.TensorProto


@pytest.mark.parametrize(
    ("data", "headline"),
    {
        "random bytes": (np.random.default_rng(0).bytes(4096), "not an ONNX model"),
        "empty": (b"", "the file is empty"),
        "truncated": (parse(small.LINEAR).SerializeToString()[:-9], "not an ONNX model"),
        "no graph": (onnx.ModelProto(ir_version=10).SerializeToString(), "not an ONNX model"),
        "zip": (b"PK\x03\x04" + bytes(100), "not an ONNX model"),
        "git-lfs": (b"version https://git-lfs.github.com/spec/v1\n", "not an ONNX model"),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_not_a_model(data: str, headline: tuple[bytes, str], tmp_path: Path) -> None:
    content, line = headline
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert first_line(refusal(path, tmp_path)) == f"{str(path)!r}: {line}"
    assert first_line(refusal(content, tmp_path)) == f"bytes: {line}"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.onnx", tmp_path).endswith("no.onnx': no such file")
    assert "this is a directory, not a model" in refusal(tmp_path, tmp_path)
    assert "the file cannot be read" in refusal("a\0b", tmp_path)
    assert first_line(refusal(3, tmp_path)) == "cannot load a model from int"
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe", tmp_path)
    assert "not a regular file" in refusal("/dev/zero", tmp_path)


def test_file_size(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(parse(small.LINEAR).SerializeToString())
    text = refusal(path, tmp_path, limits=Limits(file_bytes=100))
    assert first_line(text) == f"{str(path)!r}: the file is over the size limit"
    assert "hint:" in text
    with path.open("r+b") as file:
        file.truncate(3 << 30)  # sparse: takes no space
    assert "over 2 GiB" in refusal(path, tmp_path)


def set_dims(*dims: int) -> Mutation:
    return lambda m: m.graph.initializer[1].dims.__setitem__(slice(None), dims)


def weight(**fields: object) -> Mutation:
    """Set fields of the extra initializer 'v', FLOAT[4] in raw_data."""

    def mutate(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[1]
        tensor.ClearField("raw_data")
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(tensor, name).extend(value)
            else:
                setattr(tensor, name, value)

    return mutate


def rename_output(node: int, name: str) -> Mutation:
    return lambda m: m.graph.node[node].output.__setitem__(0, name)


def rename_input(node: int, name: str) -> Mutation:
    return lambda m: m.graph.node[node].input.__setitem__(0, name)


def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def sparse(model: onnx.ModelProto) -> None:
    entry = model.graph.sparse_initializer.add()
    entry.values.name = "s"
    make_external(entry.values, location="/etc/passwd")


def attribute(**fields: object) -> Mutation:
    def mutate(model: onnx.ModelProto) -> None:
        model.graph.node[1].attribute.add(**fields)  # type: ignore[arg-type]

    return mutate


def sequence_type(levels: int) -> Mutation:
    def mutate(model: onnx.ModelProto) -> None:
        kind = model.graph.input.add(name="s").type
        for _ in range(levels):
            kind = kind.sequence_type.elem_type
        kind.tensor_type.elem_type = F.FLOAT

    return mutate


def map_type(model: onnx.ModelProto) -> None:
    kind = model.graph.output[0].type.map_type
    kind.key_type = F.INT64
    kind.value_type.tensor_type.elem_type = F.FLOAT


def without_opset(model: onnx.ModelProto) -> None:
    del model.opset_import[:]


def opset(version: int) -> Mutation:
    return lambda m: setattr(m.opset_import[0], "version", version)


def segment(model: onnx.ModelProto) -> None:
    model.graph.initializer[1].segment.begin = 1


MISMATCH = "tensor data that does not match dtype and shape"
TWICE = "values that are defined twice"
VIOLATION = "nodes that violate the definition of their operator"
SPOILED: dict[str, tuple[Mutation, str, str]] = {
    "raw_data too short": (weight(raw_data=bytes(15)), MISMATCH, "raw_data has 15"),
    "raw_data too long": (weight(raw_data=bytes(17)), MISMATCH, "needs 16 bytes"),
    "raw_data of int4": (weight(raw_data=bytes(4), data_type=F.INT4), MISMATCH, "needs 2 bytes"),
    "raw_data of float4": (
        weight(raw_data=bytes(1), data_type=F.FLOAT4E2M1),
        MISMATCH,
        "needs 2 bytes",
    ),
    "raw_data of strings": (weight(raw_data=bytes(4), data_type=F.STRING), MISMATCH, "STRING[4]"),
    "no data": (weight(), MISMATCH, "float_data has 0"),
    "float_data too short": (weight(float_data=[1.0]), MISMATCH, "needs 4 items"),
    "int32_data of uint4": (
        weight(int32_data=[1, 2, 3, 4], data_type=F.UINT4),
        MISMATCH,
        "needs 2 items",
    ),
    "float_data of complex": (
        weight(float_data=[1.0] * 4, data_type=F.COMPLEX64),
        MISMATCH,
        "needs 8 items",
    ),
    "strings too few": (weight(string_data=[b"a"], data_type=F.STRING), MISMATCH, "has 1"),
    "wrong field": (weight(double_data=[1.0] * 4), MISMATCH, "not in double_data"),
    "two fields": (weight(raw_data=bytes(16), float_data=[1.0] * 4), MISMATCH, "and in raw_data"),
    "unknown dtype": (weight(data_type=77), "unknown data types", "data type 77"),
    "undefined dtype": (weight(data_type=0), "unknown data types", "data type 0"),
    "negative dimension": (set_dims(-4), "tensors with impossible dimensions", "[-4]"),
    "overflowing dimensions": (set_dims(2**62, 8), "tensors over the size limit", "'v'"),
    "overflow behind a zero": (set_dims(0, 2**62, 8), "tensors over the size limit", "'v'"),
    "dimensions that wrap to 4": (set_dims(2**32, 2**32, 4), "tensors over the size limit", "'v'"),
    "rank": (set_dims(*[1] * 33), "tensors over the rank limit", "rank 33"),
    "segment": (segment, "segmented tensors, which ONNX does not define", "'v'"),
    "sparse external": (sparse, "sparse tensors, which are not supported", "'s'"),
    "long name": (rename_output(0, "n" * 5000), "names over the length limit", "5000 characters"),
    "duplicate output": (rename_output(0, "y"), TWICE, "'y', again by"),
    "output hides an input": (rename_output(0, "x"), TWICE, "'x', again by"),
    "output hides a weight": (rename_output(0, "w"), TWICE, "'w', again by"),
    "duplicate initializer": (
        lambda m: setattr(m.graph.initializer[1], "name", "w"),
        TWICE,
        "two initializers 'w'",
    ),
    "duplicate input": (lambda m: m.graph.input.append(m.graph.input[0]), TWICE, "two inputs 'x'"),
    "duplicate attribute": (
        lambda m: [attribute(name="a", type=2, i=1)(m) for _ in "ab"],
        TWICE,
        "two attributes 'a'",
    ),
    "unnamed initializer": (
        lambda m: setattr(m.graph.initializer[1], "name", ""),
        "parts of the model without a name",
        "an initializer",
    ),
    "dangling input": (rename_input(0, "ghost"), "node inputs that nothing defines", "'ghost'"),
    "dangling output": (
        lambda m: setattr(m.graph.output[0], "name", "ghost"),
        "graph outputs that nothing produces",
        "'ghost'",
    ),
    "no outputs": (lambda m: m.graph.ClearField("output"), "the graph has no outputs", "hint:"),
    "cycle": (cycle, "a cycle in the graph", "node of 'y' (Relu) -> node of 'h' (Mul)"),
    "unknown domain": (
        lambda m: setattr(m.graph.node[1], "domain", "evil"),
        "operators of unknown domains",
        "'evil': node of 'y' (Relu)",
    ),
    "layout of one processor": (
        lambda m: setattr(m.graph.node[1], "domain", "com.microsoft.nchwc"),
        "operators with a hardware-specific layout",
        "ORT_ENABLE_EXTENDED",
    ),
    "processing of data": (
        lambda m: setattr(m.graph.node[1], "domain", "ai.onnx.contrib"),
        "operators of onnxruntime-extensions, which pre- or postprocess data",
        "onnx.utils.extract_model",
    ),
    "no opset": (without_opset, "operator domains without an opset import", "no opset imports"),
    "opset of another domain": (
        lambda m: setattr(m.opset_import[0], "domain", "ai.onnx.ml"),
        "unsupported opset imports",
        "version 21",
    ),
    "opset from the future": (opset(999), "unsupported opset imports", "version 999"),
    "opset zero": (opset(0), "unsupported opset imports", "version 0"),
    "two opsets": (
        lambda m: m.opset_import.add(domain="ai.onnx", version=20),
        "unsupported opset imports",
        "versions 21 and 20",
    ),
    "IR from the future": (
        lambda m: setattr(m, "ir_version", 999),
        "unsupported IR version",
        "999",
    ),
    "IR negative": (
        lambda m: setattr(m, "ir_version", -1),
        "unsupported IR version",
        "-1",
    ),
    "attribute without type": (
        attribute(name="a", i=1),
        "attributes whose value does not match their type",
        "has i",
    ),
    "attribute of another type": (
        attribute(name="a", type=2, s=b"1"),
        "attributes whose value does not match their type",
        "has s",
    ),
    "attribute without tensor": (
        attribute(name="a", type=4),
        "attributes whose value does not match their type",
        "no value",
    ),
    "attribute reference": (
        attribute(name="a", type=2, ref_attr_name="b"),
        "attributes that refer to a parameter no function declares",
        "'b'",
    ),
    "attribute not text": (attribute(name="a", type=3, s=b"\xff"), "text that is not UTF-8", "'a'"),
    "type nesting": (
        sequence_type(40),
        "subgraphs or function calls nested deeper than the limit",
        "types",
    ),
    "too many inputs": (
        lambda m: m.graph.node[1].input.append("x"),
        VIOLATION,
        "2 inputs, Relu has 1",
    ),
    "omitted input": (rename_input(1, ""), VIOLATION, "missing input X, which Relu requires"),
    "too many outputs": (
        lambda m: m.graph.node[1].output.append("y2"),
        VIOLATION,
        "2 outputs, Relu has 1",
    ),
    "unknown attribute": (
        attribute(name="a", type=2, i=1),
        VIOLATION,
        "'a', which Relu does not have",
    ),
    "attribute of a wrong type": (
        lambda m: (
            setattr(m.graph.node[1], "op_type", "Elu"),
            attribute(name="alpha", type=2, i=1)(m),
        ),
        VIOLATION,
        "attribute 'alpha' of type INT, expected FLOAT",
    ),
    "required attribute": (
        lambda m: setattr(m.graph.node[1], "op_type", "Cast"),
        VIOLATION,
        "missing attribute 'to'",
    ),
    "huge opset of another domain": (
        lambda m: m.opset_import.add(domain="com.microsoft", version=2**62),
        "unsupported opset imports",
        "'com.microsoft': version 4611686018427387904",
    ),
    "map type": (map_type, "values of map type, which cannot be differentiated", "zipmap"),
    "unknown element type": (
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77),
        "unknown data types",
        "input 'x': data type 77",
    ),
    "input without type": (
        lambda m: m.graph.input[0].ClearField("type"),
        "graph inputs without a type",
        "'x'",
    ),
    "declared type contradicts": (
        lambda m: m.graph.value_info.add(name="v").type.tensor_type.__setattr__("elem_type", 7),
        "initializers that do not match their declared type",
        "'v': FLOAT[4], declared INT64",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_invalid_model(name: str, tmp_path: Path) -> None:
    spoil, headline, detail = SPOILED[name]
    model = with_raw_weight(np.zeros(4, np.float32))
    load(model)
    spoil(model)
    before = model.SerializeToString()
    text = refusal(model, tmp_path)
    assert first_line(text) == f"ModelProto: {headline}"
    assert detail in text
    assert model.SerializeToString() == before
    text = refusal(before, tmp_path)
    assert first_line(text) == f"bytes: {headline}"


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    data = parse(small.LINEAR).SerializeToString().replace(b"agraph", b"\xff\xfe\xfd\xfc\xfb\xfa")
    assert first_line(refusal(data, tmp_path)) == "bytes: text that is not UTF-8"


def test_all_problems_of_a_kind_at_once(tmp_path: Path) -> None:
    model = parse(small.LINEAR)
    for index in range(8):
        model.graph.node.add(
            op_type="Relu", name=f"n{index}", input=[f"g{index}"], output=[f"o{index}"]
        )
    assert refusal(model, tmp_path).split("\n")[:8] == [
        "ModelProto: node inputs that nothing defines",
        *(f"  'g{i}' of node 'n{i}' (Relu)" for i in range(5)),
        "  and 3 more",
        "hint: the model is not valid ONNX; export it again, or repair it with onnx_ir",
    ]


def test_a_hostile_name_does_not_flood_the_message(tmp_path: Path) -> None:
    model = parse(small.LINEAR)
    model.graph.node[0].input[0] = "\x1b[2J" + "n" * 4000
    text = refusal(model, tmp_path)
    assert "\x1b" not in text
    assert len(text) < 500
