"""What `load` accepts, and how it normalizes models."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.errors import LoadError
from onnxtrain.graph.io import CheckedModel, Limits, load, reader
from tests.artifacts.models import classifier
from tests.graph import small_models as small
from tests.graph.small_models import parse


def write(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("name", small.ALL)
def test_every_kind_of_source_gives_the_same_model(name: str, tmp_path: Path) -> None:
    proto = parse(small.ALL[name])
    path = write(proto, tmp_path)
    models = [
        load(source)
        for source in (path, str(path), proto.SerializeToString(), proto, ir.from_proto(proto))
    ]
    texts = {ir.to_proto(model).SerializeToString(deterministic=True) for model in models}
    assert len(texts) == 1
    onnx.checker.check_model(ir.to_proto(models[0]), full_check=True)


def test_a_model_proto_is_not_changed_nor_shared() -> None:
    proto = parse(small.BRANCHES)
    before = proto.SerializeToString()
    model = load(proto)
    node = next(n for n in model.graph if n.op_type == "If")
    weight = node.attributes["then_branch"].as_graph().initializers["k"]
    weight.name = "renamed"
    assert proto.SerializeToString() == before
    proto.graph.node[1].attribute[0].g.initializer[0].float_data[0] = 99
    assert weight.const_value is not None
    assert weight.const_value.numpy().tolist() == [1, 2]


def test_an_ir_model_is_not_changed_nor_shared() -> None:
    original = ir.from_proto(parse(small.LINEAR))
    original.meta["mine"] = 1
    before = ir.to_proto(original)
    model = load(original)
    model.graph.initializers["w"].name = "renamed"
    model.graph.remove(model.graph[-1])
    assert ir.to_proto(original) == before
    tensor = original.graph.initializers["w"].const_value
    assert tensor is not None
    assert tensor.name == "w"
    assert model.meta["mine"] == 1


def test_a_checked_model_is_copied_without_a_second_check(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = CheckedModel(load(parse(small.LINEAR)))
    before = ir.to_proto(checked.model)
    monkeypatch.delattr(reader, "_from_ir")
    model = load(checked)
    model.graph.remove(model.graph[-1])
    assert ir.to_proto(checked.model) == before


@pytest.mark.parametrize("target", ["cpu", "web"])
def test_build_checks_a_model_once(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    finish = reader._finish_load
    monkeypatch.setattr(reader, "_finish_load", lambda *args: calls.append(1) or finish(*args))
    loss = onnxtrain.losses.LossTerm("cross_entropy", output="scores")
    onnxtrain.build(classifier(), loss=loss, optimizer="sgd", target=target, check=False)
    assert len(calls) == 1


def test_weights_cannot_be_written_to() -> None:
    model = load(small.with_raw_weight(np.zeros(4, np.float32)))
    tensor = model.graph.initializers["v"].const_value
    assert tensor is not None
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0] = 1


def test_unsorted_nodes_are_sorted() -> None:
    proto = parse(small.LOOP)
    proto.graph.node.reverse()
    assert [node.op_type for node in load(proto).graph] == ["Neg", "Loop"]
    # The same for an ir.Model, which must not change.
    original = ir.from_proto(proto)
    assert [node.op_type for node in load(original).graph] == ["Neg", "Loop"]
    assert [node.op_type for node in original.graph] == ["Loop", "Neg"]


def test_initializers_listed_as_inputs_become_constants() -> None:
    proto = parse(small.LINEAR)
    proto.ir_version = 3
    info = proto.graph.input.add()
    info.name = "w"
    info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    info.type.tensor_type.shape.dim.add().dim_value = 3
    model = load(proto)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["w"]
    assert [v.name for v in load(ir.from_proto(proto)).graph.inputs] == ["x"]


def test_a_missing_ir_version_is_filled_in() -> None:
    proto = parse(small.LINEAR)
    proto.ClearField("ir_version")
    assert load(proto).ir_version == 10


def test_the_long_name_of_the_default_domain() -> None:
    proto = parse(small.LINEAR)
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"
    model = load(proto)
    assert model.opset_imports == {"": 21}
    assert {node.domain for node in model.graph} == {""}


def test_shadowing_subgraph_values_are_renamed() -> None:
    proto = parse(
        small.LOOP.replace("float[2] s)", "float[2] x)").replace("Add(s, h)", "Add(x, h)")
    )
    model = load(proto)
    loop = next(node for node in model.graph if node.op_type == "Loop")
    body = loop.attributes["body"].as_graph()
    assert [value.name for value in body.inputs] == ["i", "g", "x.2"]
    assert [v and v.name for v in body[1].inputs] == ["x.2", "h"]
    assert proto.graph.node[1].attribute[0].g.input[2].name == "x"


def test_unknown_dimensions_written_as_minus_one() -> None:
    proto = parse(small.LINEAR)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    shape = load(proto).graph.inputs[0].shape
    assert shape is not None
    assert shape[0] == ir.SymbolicDim(None)
    assert shape[1] == 3


def test_custom_domains_on_request() -> None:
    text = small.LINEAR.replace('["" : 21]', '["" : 21, "mine" : 1]').replace("Relu", "mine.Relu")
    with pytest.raises(LoadError, match="unknown domains"):
        load(parse(text))
    for allowed in ({"mine"}, ["mine"], "mine"):
        model = load(parse(text), allow_domains=allowed)
        assert model.graph[-1].domain == "mine"
    assert load(parse(text.replace("mine", "com.microsoft"))).graph[-1].domain == "com.microsoft"


def test_device_annotations_are_removed() -> None:
    proto = parse(small.BRANCHES)
    inner = proto.graph.node[1].attribute[0].g.node[0]
    inner.device_configurations.add().configuration_id = "gpu"
    before = proto.SerializeToString()
    assert not any(node.device_configurations for node in load(proto).graph.all_nodes())
    assert proto.SerializeToString() == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool", "complex64"])
@pytest.mark.parametrize("offset", [0, 64, 3])
def test_external_data_of_every_width(dtype: str, offset: int, tmp_path: Path) -> None:
    values = np.arange(6).reshape(2, 3).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    proto = small.with_raw_weight(values, ir.DataType.from_numpy(values.dtype))
    small.make_external(
        proto.graph.initializer[1], location="sub/w.bin", offset=offset, length=values.nbytes
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(bytes(offset) + values.tobytes() + b"tail")
    model = load(write(proto, tmp_path))
    tensor = model.graph.initializers["v"].const_value
    assert tensor is not None
    assert tensor.tobytes() == values.tobytes()
    np.testing.assert_array_equal(tensor.numpy(), values)
    again = load(model).graph.initializers["v"].const_value
    assert again is not None
    assert again.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT4E2M1])
@pytest.mark.parametrize("external", [False, True], ids=["raw_data", "external"])
def test_sub_byte_types_are_packed(dtype: ir.DataType, external: bool, tmp_path: Path) -> None:
    packed = np.array([0x21, 0x43, 0x05], np.uint8)  # five elements: 1, 2, 3, 4, 5
    proto = small.with_raw_weight(packed, dtype)
    tensor_proto = proto.graph.initializer[1]
    tensor_proto.dims[:] = [5]
    if external:
        small.make_external(tensor_proto, location="w.bin")
        (tmp_path / "w.bin").write_bytes(packed.tobytes())
    tensor = load(write(proto, tmp_path)).graph.initializers["v"].const_value
    assert tensor is not None
    bits = tensor.numpy().view(np.uint8) & 0xF
    assert bits.tolist() == [1, 2, 3, 4, 5]
    assert tensor.tobytes() == packed.tobytes()


def test_external_data_of_constants_and_subgraphs(tmp_path: Path) -> None:
    proto = parse(small.BRANCHES)
    small.make_external(proto.graph.node[1].attribute[0].g.initializer[0], location="w.bin")
    node = proto.graph.node.add(op_type="Constant", output=["c1"])
    attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    attribute.t.data_type = onnx.TensorProto.FLOAT
    small.make_external(attribute.t, location="w.bin", offset=4)
    (tmp_path / "w.bin").write_bytes(np.array([5, 6], np.float32).tobytes())
    model = load(write(proto, tmp_path))
    branch = model.graph[1].attributes["then_branch"].as_graph()
    weight = branch.initializers["k"].const_value
    assert weight is not None
    assert weight.numpy().tolist() == [5, 6]
    assert model.graph[2].attributes["value"].as_tensor().numpy() == 6


def test_external_data_stays_valid_when_its_file_is_replaced(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(values.tobytes())
    model = load(write(small.external_model(location="w.bin"), tmp_path))
    (tmp_path / "new").write_bytes(bytes(12))
    os.replace(tmp_path / "new", tmp_path / "w.bin")
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    assert tensor.numpy().tolist() == [0, 1, 2]


def test_empty_tensors_need_no_data(tmp_path: Path) -> None:
    proto = small.with_raw_weight(np.zeros((0, 3), np.float32))
    proto.graph.initializer[1].ClearField("raw_data")
    tensor = load(proto).graph.initializers["v"].const_value
    assert tensor is not None
    assert tensor.numpy().shape == (0, 3)
    small.make_external(proto.graph.initializer[1], location="w.bin")
    (tmp_path / "w.bin").write_bytes(b"")
    tensor = load(write(proto, tmp_path)).graph.initializers["v"].const_value
    assert tensor is not None
    assert tensor.numpy().shape == (0, 3)


def test_an_ir_model_with_external_tensors(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.arange(3, dtype=np.float32).tobytes())
    path = write(small.external_model(location="w.bin"), tmp_path)
    tensor = load(ir.load(path)).graph.initializers["w"].const_value
    assert tensor is not None
    assert tensor.numpy().tolist() == [0, 1, 2]


def test_string_tensors() -> None:
    proto = parse(small.LINEAR)
    tensor = proto.graph.initializer.add(name="s", data_type=onnx.TensorProto.STRING)
    tensor.dims.append(2)
    tensor.string_data.extend([b"a", b"\xff"])
    value = load(proto).graph.initializers["s"].const_value
    assert value is not None
    assert value.numpy().tolist() == [b"a", b"\xff"]


def test_limits_can_be_raised() -> None:
    proto = parse(small.LINEAR)
    with pytest.raises(LoadError, match="more nodes than the limit"):
        load(proto, limits=Limits(nodes=1))
    assert len(load(proto, limits=Limits(nodes=2)).graph) == 2
    assert load(small.nested_ifs(40), limits=Limits(depth=40)).graph[0].op_type == "If"
