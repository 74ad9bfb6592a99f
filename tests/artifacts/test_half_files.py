"""16-bit models: training uses float32 master weights, export restores the type."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnxtrain import losses
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.graph.io import load
from onnxtrain.training import Trainer
from tests.training.nets import NETS, batches, exported

HALF = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = {"w1": (8, 24), "b1": (24,), "w2": (24, 4), "b2": (4,)}


@functools.cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {n: rng.standard_normal(s).astype(np.float16) / 4 for n, s in SHAPES.items()}


def mlp(dtype: str, *, narrow_ends: bool = False) -> onnx.ModelProto:
    """An MLP with weights of a type; input and output are float32 by default."""
    word = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}[dtype]
    ends = word if narrow_ends else "float"
    number = {"float32": 1, "float16": 10, "bfloat16": 16}[dtype]
    shapes = ", ".join(f"{word}{list(s)} {n}" for n, s in SHAPES.items())
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g ({ends}[N,8] x) => ({ends}[N,4] y) <{shapes}> {{
        c = Cast <to = {number}> (x)
        h = MatMul(c, w1)  a = Add(h, b1)  t = Tanh(a)
        s = MatMul(t, w2)  o = Add(s, b2)
        y = Cast <to = {number if narrow_ends else 1}> (o)
    }}"""
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    for name, array in weights().items():
        tensor = ir.Tensor(array.astype(NUMPY.get(dtype, np.float32)), name=name)
        model.graph.initializer.append(ir.to_proto(tensor))
    return model


def batch(dtype: object = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((16, 8)).astype(np.float16).astype(dtype)
    return x, rng.standard_normal((16, 4)).astype(np.float32)


def trained(dtype: str, steps: int) -> tuple[Trainer, list[float]]:
    trainer = Trainer(build(mlp(dtype), loss="mse", optimizer="adamw:lr=1e-5"))
    return trainer, [float(trainer.step(*batch()).loss) for _ in range(steps)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_updates_are_not_lost(dtype):
    trainer, narrow = trained(dtype, 1000)
    _, wide = trained("float32", 1000)
    exact = 5e-6 if dtype == "float16" else 1e-2  # the start is rounded to bfloat16
    np.testing.assert_allclose(narrow, wide, rtol=exact)
    for name, start in weights().items():
        start = start.astype(NUMPY[dtype]).astype(np.float32)
        assert (trainer.parameters[name] != start).all(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_state_is_float32_in_the_manifest_too(dtype):
    artifacts = build(mlp(dtype), loss="mse", optimizer="adamw")
    manifest = artifacts.manifest
    assert {w.dtype for w in manifest.parameters} == {"float32"}
    assert {s.dtype for s in manifest.state} == {"float32"}
    assert [r for r in manifest.options["repairs"] if dtype in r and "float32" in r]


@pytest.mark.parametrize("target", ["cpu", "wasm", "cuda", "portable", "webgpu"])
def test_every_target_has_float32_masters(target):
    artifacts = build(mlp("float16"), loss="mse", optimizer="sgd", target=target)
    assert {w.dtype for w in artifacts.manifest.parameters} == {"float32"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_export_has_the_types_of_the_file(tmp_path, dtype):
    trainer, _ = trained(dtype, 3)
    trainer.export(tmp_path / "out.onnx")
    model = load(tmp_path / "out.onnx")
    assert {x.dtype for x in model.graph.initializers.values()} == {HALF[dtype]}
    for name, x in model.graph.initializers.items():
        rounded = trainer.parameters[name].astype(NUMPY[dtype])
        np.testing.assert_array_equal(x.const_value.numpy(), rounded)


def test_predictions_are_those_of_the_export(tmp_path):
    trainer = Trainer(
        build(mlp("float16", narrow_ends=True), loss="mse", optimizer="adamw:lr=1e-2")
    )
    x, target = batch(np.float16)
    first = trainer.step(x, target).loss
    for _ in range(20):
        last = trainer.step(x, target).loss
    assert last < 0.9 * first
    trainer.export(tmp_path / "out.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    want = session.run(None, {"x": x})[0]
    assert want.dtype == np.float16
    np.testing.assert_array_equal(trainer.predict(x)["y"], want)


def test_a_directory_keeps_masters_and_types(tmp_path):
    artifacts = build(mlp("float16"), loss="mse", optimizer="adamw:lr=1e-5")
    manifest = artifacts.save(tmp_path / "run")
    assert {place.dtype for w in manifest.parameters for place in w.locations} == {"float16"}
    trainer, same = Trainer(Artifacts.load(tmp_path / "run")), Trainer(artifacts)
    for _ in range(2):
        assert trainer.step(*batch()).loss == same.step(*batch()).loss
    trainer.save(tmp_path / "checkpoint")
    again = Trainer(Artifacts.load(tmp_path / "run"))
    again.load(tmp_path / "checkpoint")
    assert again.step(*batch()).loss == same.step(*batch()).loss
    np.testing.assert_array_equal(again.predict(batch()[0])["y"], same.predict(batch()[0])["y"])


def test_frozen_weights_keep_their_bytes():
    rng = np.random.default_rng(1)
    big = rng.standard_normal((8, 1024)).astype(np.float16)
    back = rng.standard_normal((1024, 24)).astype(np.float16) / 32
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float16[N,8] x) => (float16[N,24] y)
    <float16[8,1024] big, float16[1024,24] back, float16[24] bias> {
        h = MatMul(x, big) t = Tanh(h) s = MatMul(t, back) y = Add(s, bias)
    }"""
    model = onnx.parser.parse_model(text)
    del model.graph.initializer[:]
    for name, array in {"big": big, "back": back, "bias": np.zeros(24, np.float16)}.items():
        model.graph.initializer.append(ir.to_proto(ir.Tensor(array, name=name)))
    artifacts = build(model, loss="mse", optimizer="sgd", train="bias")
    step = {t.name: t for t in artifacts.models["step"].graph.initializer}
    assert step["big"].raw_data == big.tobytes()
    trainer = Trainer(artifacts)
    x = rng.standard_normal((4, 8)).astype(np.float16)
    zero = np.zeros((4, 24), np.float32)
    exact = np.tanh(x.astype(float) @ big.astype(float)) @ back.astype(float)
    np.testing.assert_allclose(trainer.evaluate_batch(x, zero).loss, (exact**2).mean(), rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_of_a_file_in_16_bits(precision):
    artifacts = build(mlp("float16"), loss="mse", optimizer="adamw:lr=1e-3", precision=precision)
    trainer = Trainer(artifacts)
    values = [trainer.step(*batch()).loss for _ in range(20)]
    assert values[-1] < 0.99 * values[0]


def test_the_types_of_the_file_can_be_kept():
    artifacts = build(mlp("float16"), loss="mse", optimizer="sgd", precision="file")
    assert {w.dtype for w in artifacts.manifest.parameters} == {"float16"}


def _in_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """The net with all its floats in float16."""
    work = ir.from_proto(model)
    half = ir.TensorType(ir.DataType.FLOAT16)
    values = [*work.graph.inputs, *work.graph.outputs, *work.graph.initializers.values()]
    for value in values:
        if value.dtype == ir.DataType.FLOAT:
            value.type = half
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            array = value.const_value.numpy().astype(np.float16)
            value.const_value = ir.Tensor(array, name=value.name)
    for node in work.graph.all_nodes():
        for y in node.outputs:
            y.type = None
        to = node.attributes.get("to")
        if to is not None and to.value == ir.DataType.FLOAT.value:
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT16.value)
        value = node.attributes.get("value")
        if value is not None and value.value.dtype == ir.DataType.FLOAT:
            array = value.value.numpy().astype(np.float16)
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(array))
    return ir.to_proto(work)


@pytest.mark.parametrize("name", sorted(NETS))
def test_whole_nets(name):
    model = _in_half(exported(name, training=True))
    trainer = Trainer(
        build(model, loss=losses.CrossEntropy(axis=NETS[name].axis), optimizer="adamw:lr=1e-2")
    )
    x, labels = batches(name, 1)[0]
    x = x.astype(np.float16) if x.dtype.kind == "f" else x
    results = [trainer.step(x, labels).loss for _ in range(15)]
    assert np.isfinite(results).all()
    assert results[-1] < 0.9 * results[0]
