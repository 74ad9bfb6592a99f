"""Weights too large for a protobuf: one memory-mapped file that all models share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain
from onnxtrain import losses
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.graph.io import external_data, load, save, writer
from onnxtrain.training import Trainer

WIDTH, LAYERS, CLASSES = 32, 3, 4
LOSS = losses.LossTerm("mse", output="y")


def deep(width: int = WIDTH, layers: int = LAYERS) -> ir.Model:
    """Many square layers and a head, in memory."""
    rng = np.random.default_rng(9)
    shapes = {f"w{i}": (width, width) for i in range(layers)} | {"head": (width, CLASSES)}
    steps = [f"h{i + 1} = MatMul(h{i}, w{i}) t{i + 1} = Tanh(h{i + 1})" for i in range(layers)]
    lines = " ".join(steps)
    for i in range(layers):
        lines = lines.replace(f"MatMul(h{i},", f"MatMul(t{i},")
    declared = ", ".join(f"float{list(s)} {n}" for n, s in shapes.items())
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[N,{width}] t0) => (float[N,{CLASSES}] y) <{declared}> {{
        {lines} y = MatMul(t{layers}, head) }}"""
    proto = onnx.parser.parse_model(text)
    del proto.graph.initializer[:]
    for name, shape in shapes.items():
        array = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[0]))
        proto.graph.initializer.append(ir.to_proto(ir.Tensor(array, name=name)))
    return load(proto)


@pytest.fixture(params=["file", "memory"])
def given(request, tmp_path, monkeypatch) -> object:
    """The model with external data or in memory, with a low limit for large models."""
    monkeypatch.setattr(external_data, "LARGE_MODEL_BYTES", 4096)
    if request.param == "memory":
        return deep()
    (tmp_path / "in").mkdir()
    save(deep(), tmp_path / "in" / "deep.onnx", external_data_above=0)
    assert (tmp_path / "in" / "deep.onnx.data").exists()
    return tmp_path / "in" / "deep.onnx"


def batch(width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.standard_normal((5, width), np.float32), rng.standard_normal(
        (5, CLASSES), np.float32
    )


def reference(**options: object) -> Trainer:
    """The same training from protobufs that contain the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_data, "LARGE_MODEL_BYTES", 1 << 40)
        return Trainer(build(deep(), loss=LOSS, optimizer="adamw:lr=0.01", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("train", [["head"], None])
def test_it_trains_like_a_small_model(given, train):
    artifacts = build(given, loss=LOSS, optimizer="adamw:lr=0.01", train=train)
    for key, model in artifacts.models.items():
        for t in model.graph.initializer:
            assert len(t.raw_data) < 1024, (key, t.name)
    trainer, other = Trainer(artifacts), reference(train=train)
    for _ in range(3):
        assert trainer.step(*batch()).loss == other.step(*batch()).loss
    assert trainer.evaluate_batch(*batch()).loss == other.evaluate_batch(*batch()).loss
    x = batch()[0]
    np.testing.assert_array_equal(trainer.predict(x)["y"], other.predict(x)["y"])


def test_a_directory_holds_one_file_of_weights(given, tmp_path):
    artifacts = build(given, loss=LOSS, optimizer="adamw:lr=0.01", train=["head"])
    manifest = artifacts.save(tmp_path / "run")
    assert manifest.weights == "weights.bin"
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "run").iterdir()}
    assert max(sizes[m.file] for m in manifest.models) < 3 * 4096 <= sizes["weights.bin"]
    trainer, other = Trainer(tmp_path / "run"), reference(train=["head"])
    assert trainer.step(*batch()).loss == other.step(*batch()).loss
    x = batch()[0]
    np.testing.assert_array_equal(trainer.predict(x)["y"], other.predict(x)["y"])


@pytest.mark.parametrize("train", [["head"], None])
@pytest.mark.parametrize("saved", [True, False])
def test_exported_model_is_complete(given, tmp_path, monkeypatch, train, saved):
    artifacts = build(given, loss=LOSS, optimizer="adamw:lr=0.01", train=train)
    if saved:
        artifacts.save(tmp_path / "run")
    trainer = Trainer(tmp_path / "run" if saved else artifacts)
    trainer.step(*batch())
    monkeypatch.setattr(writer.save, "__kwdefaults__", {"external_data_above": 4096})
    trainer.export(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size >= 3 * WIDTH * WIDTH * 4
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    x = batch()[0]
    want = session.run(None, {"t0": x})[0]
    np.testing.assert_allclose(trainer.predict(x)["y"], want, rtol=1e-5, atol=1e-6)


def test_loaded_artifacts_can_be_saved(given, tmp_path):
    build(given, loss=LOSS, optimizer="sgd", train=["head"]).save(tmp_path / "run")
    for target in ("copy", "run"):
        Artifacts.load(tmp_path / "run").save(tmp_path / target)
        again = Trainer(tmp_path / target)
        assert again.step(*batch()).loss == Trainer(tmp_path / "run").step(*batch()).loss


def test_the_original_is_unchanged(given, tmp_path):
    if not isinstance(given, Path):
        pytest.skip("there is no file")
    before = {p: p.read_bytes() for p in given.parent.iterdir()}
    trainer = Trainer(build(given, loss=LOSS, optimizer="sgd"))
    trainer.step(*batch())
    trainer.export(tmp_path / "out.onnx")
    assert {p: p.read_bytes() for p in given.parent.iterdir()} == before


def test_deleted_weights_are_named(given, tmp_path):
    if not isinstance(given, Path):
        pytest.skip("there is no file")
    artifacts = build(given, loss=LOSS, optimizer="sgd")
    (given.parent / "deep.onnx.data").unlink()
    with pytest.raises(onnxtrain.errors.SaveError, match=r"deep\.onnx\.data.*\n.*do not move"):
        artifacts.save(tmp_path / "run")


def test_an_older_opset_is_refused_with_a_hint(given):
    with pytest.raises(onnxtrain.errors.PrepareError, match="lower the exported model"):
        build(given, loss=LOSS, optimizer="sgd", opset=13)


SCRIPT = """
import resource, sys, time
from pathlib import Path
import numpy as np
import onnxtrain
from onnxtrain import losses

path, out, width = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = time.perf_counter()
artifacts = onnxtrain.build(
    path, loss=losses.LossTerm("mse", output="y"), optimizer="sgd:lr=0.001", train=["head"]
)
print(time.perf_counter() - start, peak(), flush=True)
start = time.perf_counter()
artifacts.save(out)
print(time.perf_counter() - start, peak(), flush=True)
trainer = onnxtrain.Trainer(out, threads=1)
rng = np.random.default_rng(1)
x, target = rng.standard_normal((2, width), np.float32), np.ones((2, 4), np.float32)
losses = [trainer.step(x, target).loss for _ in range(3)]
assert losses[2] < losses[0], losses
print(time.perf_counter() - start, peak(), flush=True)
trainer.export(out / "export.onnx")
print(time.perf_counter() - start, peak(), flush=True)
onnxtrain.explain(path)
"""


@pytest.mark.full
def test_three_gigabytes(tmp_path):
    width, layers = 8192, 12
    size = width * width * 4 * layers
    path = tmp_path / "large.onnx"
    write_large(path, width, layers)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), path, tmp_path / "run", str(width)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    print(f"{size:,} bytes of weights; seconds and peak of build, save, train, export: {rows}")
    (seconds, peak), *_ = rows
    assert seconds < 60
    assert peak < 1.3 * size
    for p in (tmp_path / "run").iterdir():
        p.unlink()


def write_large(path: Path, width: int, layers: int) -> None:
    """Write a deep model layer by layer, without holding it in memory."""
    small = ir.to_proto(deep(16, layers))
    rng = np.random.default_rng(2)
    with path.with_name("large.data").open("wb") as data:
        for tensor in small.graph.initializer:
            shape = [width if d == 16 else d for d in tensor.dims]
            row = rng.standard_normal(shape[-1], np.float32) / np.float32(np.sqrt(width))
            offset = data.tell()
            for _ in range(shape[0]):
                row = np.roll(row, 1)
                data.write(row.tobytes())
            tensor.ClearField("raw_data")
            tensor.dims[:] = shape
            tensor.data_location = onnx.TensorProto.EXTERNAL
            entries = {
                "location": "large.data",
                "offset": offset,
                "length": 4 * int(np.prod(shape)),
            }
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=str(value))
    small.graph.input[0].type.tensor_type.shape.dim[1].dim_value = width
    del small.graph.value_info[:]
    path.write_bytes(small.SerializeToString())
