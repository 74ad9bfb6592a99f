"""What `save` writes, and that it writes atomically."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain.errors import SaveError
from onnxtrain.graph.io import load, save
from onnxtrain.graph.io import writer as write
from tests.graph import small_models as small
from tests.graph.small_models import parse


def with_weights(*sizes: int) -> ir.Model:
    """Return LINEAR with extra float initializers of the given sizes."""
    model = load(parse(small.LINEAR))
    for index, size in enumerate(sizes):
        tensor = ir.tensor(np.arange(size, dtype=np.float32) + index, name=f"v{index}")
        model.graph.register_initializer(ir.Value(name=f"v{index}", const_value=tensor))
    return load(model)


def weights(model: ir.Model) -> dict[str, list[float]]:
    values = {}
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        values[name] = value.const_value.numpy().tolist()
    return values


@pytest.mark.parametrize("name", small.ALL)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = load(parse(small.ALL[name]))
    before = ir.to_proto(model)
    save(model, tmp_path / "a.onnx")
    again = load(tmp_path / "a.onnx")
    assert ir.to_proto(again) == before
    assert ir.to_proto(model) == before
    save(again, str(tmp_path / "b.onnx"))
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx"]
    onnx.checker.check_model(tmp_path / "a.onnx", full_check=True)


def test_a_model_proto_is_written_as_it_is(tmp_path: Path) -> None:
    proto = parse(small.FUNCTION)
    save(proto, tmp_path / "a.onnx")
    assert onnx.load(tmp_path / "a.onnx") == proto


@pytest.mark.parametrize("as_proto", [False, True], ids=["ir.Model", "ModelProto"])
def test_external_data(as_proto: bool, tmp_path: Path) -> None:
    model = with_weights(1000, 3, 257)
    source = ir.to_proto(model) if as_proto else model
    path = tmp_path / "net.onnx"
    save(source, path, external_data_above=2000)
    assert sorted(os.listdir(tmp_path)) == ["net.onnx", "net.onnx.data"]
    stored = {t.name: t for t in onnx.load(path, load_external_data=False).graph.initializer}
    external = {n for n, t in stored.items() if t.data_location == onnx.TensorProto.EXTERNAL}
    assert external == {"v0", "v2"}  # the others are too small to be worth it
    entries = {e.key: e.value for e in stored["v2"].external_data}
    assert entries == {"location": "net.onnx.data", "offset": "4032", "length": "1028"}
    assert weights(load(path)) == weights(model)
    assert isinstance(model.graph.initializers["v0"].const_value, ir.Tensor)
    # onnx and onnxruntime can read it.
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.ones((1, 3), np.float32)})
    np.testing.assert_array_equal(y, [[1, 2, 3]])


def test_the_threshold_is_the_size_of_the_file(tmp_path: Path) -> None:
    model = with_weights(1000)
    save(model, tmp_path / "a.onnx")
    size = (tmp_path / "a.onnx").stat().st_size
    save(model, tmp_path / "b.onnx", external_data_above=size)
    save(model, tmp_path / "c.onnx", external_data_above=size - 1)
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx", "c.onnx", "c.onnx.data"]


def test_weights_of_subgraphs_go_to_external_data(tmp_path: Path) -> None:
    proto = parse(small.BRANCHES)
    branch = proto.graph.node[1].attribute[0].g
    tensor = branch.initializer.add(name="big", data_type=onnx.TensorProto.FLOAT)
    tensor.dims.append(500)
    tensor.raw_data = np.arange(500, dtype=np.float32).tobytes()
    save(load(proto), tmp_path / "a.onnx", external_data_above=100)
    assert (tmp_path / "a.onnx.data").stat().st_size == 2000
    node = load(tmp_path / "a.onnx").graph[1]
    value = node.attributes["then_branch"].as_graph().initializers["big"].const_value
    assert value is not None
    assert value.numpy()[-1] == 499


def test_a_model_is_saved_over_its_own_external_data(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    save(with_weights(1000, 500), path, external_data_above=0)
    model = load(path)
    model.graph.initializers.pop("v0")
    expected = weights(model)
    save(model, path, external_data_above=0)
    assert weights(model) == expected
    assert weights(load(path)) == expected
    # The same with tensors that onnx_ir has not opened yet.
    lazy = ir.load(path)
    save(lazy, path)
    assert weights(lazy) == expected
    assert weights(load(path)) == expected


def test_external_tensors_are_copied(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save(with_weights(1000), tmp_path / "in" / "net.onnx", external_data_above=0)
    save(ir.load(tmp_path / "in" / "net.onnx"), tmp_path / "out" / "net.onnx")
    assert os.listdir(tmp_path / "out") == ["net.onnx"]
    assert weights(load(tmp_path / "out" / "net.onnx"))["v0"][-1] == 999


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda m: m.ClearField("ir_version"), "no IR version"),
        (lambda m: m.ClearField("opset_import"), "no opset"),
        (lambda m: m.Clear(), "no IR version and no opset"),
    ],
)
def test_versions_must_be_explicit(spoil, what: str, tmp_path: Path) -> None:
    proto = parse(small.LINEAR)
    spoil(proto)
    with pytest.raises(SaveError, match=f"a.onnx': the model has {what}"):
        save(proto, tmp_path / "a.onnx")
    with pytest.raises(SaveError, match=f"a.onnx': the model has {what}"):
        save(ir.from_proto(proto), tmp_path / "a.onnx")
    assert os.listdir(tmp_path) == []


def test_model_proto_with_external_data_raises(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the ModelProto refers to external data: 'w'"):
        save(small.external_model(location="w.bin"), tmp_path / "a.onnx")
    assert os.listdir(tmp_path) == []


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="cannot be written"):
        save(parse(small.LINEAR), tmp_path / "no" / "a.onnx")
    assert os.listdir(tmp_path) == []


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("a.onnx", "a.onnx.data"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    save(with_weights(1000), tmp_path / "a.onnx", external_data_above=0)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "a.onnx").is_symlink()
    assert weights(load(tmp_path / "a.onnx"))["v0"][-1] == 999


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("above", [0, 1 << 30], ids=["external", "one file"])
def test_a_failure_leaves_the_old_file(
    call: str, above: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.onnx"
    save(parse(small.LOOP), path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write.os, call, fail)
    with pytest.raises(SaveError, match=r"cannot be written\n.*No space left"):
        save(with_weights(1000), path, external_data_above=above)
    assert os.listdir(tmp_path) == ["a.onnx"]
    assert path.read_bytes() == before


def test_old_model_never_reads_new_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.onnx"
    save(with_weights(1000), path, external_data_above=0)
    replace = os.replace

    def stop_after_data(source: str, target: str) -> None:
        if target == str(path):
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(write.os, "replace", stop_after_data)
    with pytest.raises(SaveError, match="cannot be written"):
        save(with_weights(500, 500), path, external_data_above=0)
    assert os.listdir(tmp_path) == ["a.onnx.data"]


def test_umask_applies(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    save(parse(small.LINEAR), tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_training_info_is_not_lost_silently(tmp_path: Path) -> None:
    proto = ir.to_proto(with_weights(1000))
    proto.training_info.add()
    save(proto, tmp_path / "a.onnx")
    assert len(onnx.load(tmp_path / "a.onnx").training_info) == 1
    with pytest.raises(SaveError, match="training_info"):
        save(proto, tmp_path / "b.onnx", external_data_above=0)


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    special, link = tmp_path / "special", tmp_path / "link"
    os.mkfifo(special)
    link.symlink_to(special)
    for path in (special, link):
        with pytest.raises(SaveError, match="not a regular file but a pipe, a device or a socket"):
            save(parse(small.LINEAR), path)
    assert stat.S_ISFIFO(special.stat().st_mode)
    assert link.is_symlink()
