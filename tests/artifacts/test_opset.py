"""Artifacts for older opsets train like those of the default opset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from onnxtrain import losses, optim
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.cli import main as cli
from onnxtrain.errors import LoweringError
from onnxtrain.manifest import Manifest
from onnxtrain.training.trainer import Trainer
from tests.artifacts.models import classifier, finished, graph, weight, with_norm

SCORES = [losses.LossTerm("cross_entropy", output="scores")]


def images() -> onnx.ModelProto:
    """x [batch, 2, 6, 6] -> y [batch, 3]: a convolution, pooling that overlaps, a norm, dropout."""
    rng, op = np.random.default_rng(0), graph()

    def draw(name: str, *shape: int) -> ir.Value:
        return weight(op, name, rng.standard_normal(shape).astype(np.float32) / 4)

    x = op.input("x", ir.DataType.FLOAT, ["batch", 2, 6, 6])
    h = op.Conv(x, draw("conv.weight", 4, 2, 3, 3), draw("conv.bias", 4), pads=[1, 1, 1, 1])
    h = op.MaxPool(op.Gelu(h), kernel_shape=[3, 3], strides=[2, 2])
    h = op.Reshape(h, [-1, 16])
    h = op.LayerNormalization(h, draw("norm.weight", 16), draw("norm.bias", 16))
    h = op.Dropout(h, weight(op, "ratio", np.array(0.25, np.float32)))
    return finished(op, y=op.MatMul(h, draw("head.weight", 16, 3)))


NETS: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "classifier": (classifier, (6,), {"loss": SCORES, "clip": 1.0, "ema": 0.9}),
    "batch norm": (with_norm, (4, 5), {"optimizer": optim.SGD(momentum=0.9)}),
    "images": (images, (2, 6, 6), {"target": "webgpu"}),
}


def trained(artifacts: Artifacts, dims: tuple[int, ...], layout: str) -> list[float]:
    """The losses of three steps, and of an evaluation after them."""
    rng = np.random.default_rng(2)
    trainer = Trainer(artifacts, seed=1, layout=layout)
    x = rng.standard_normal((3, 4, *dims)).astype(np.float32)
    y = rng.integers(0, 3, (3, 4))
    step_losses = [trainer.step(x[i], y[i]).loss for i in range(3)]
    return [*step_losses, trainer.evaluate_batch(x[0], y[0]).loss]


def built(net: str, **options: Any) -> Artifacts:
    model, _, more = NETS[net]
    return build(model(), **{"loss": "cross_entropy", "optimizer": "adamw", **more, **options})


@pytest.mark.parametrize("opset", [11, 13, 17])
@pytest.mark.parametrize("net", NETS)
def test_equal_losses(net: str, opset: int):
    artifacts = built(net, opset=opset)
    assert artifacts.manifest.options["opset"] == opset
    for model in artifacts.models.values():
        assert [(o.domain, o.version) for o in model.opset_import] == [("", opset)]
        assert model.ir_version <= 8
    plain = built(net)
    assert plain.manifest.options["opset"] == 21
    assert artifacts.manifest.models == plain.manifest.models
    dims = NETS[net][1]
    for layout in ("fused", "separate"):
        actual, expected = (trained(a, dims, layout) for a in (artifacts, plain))
        np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_inference_model_and_weights(tmp_path: Path):
    """It runs, and export writes trained weights into it."""
    artifacts = built("batch norm", opset=13)
    trainer = Trainer(artifacts)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 4, 5)).astype(np.float32)
    trainer.step(x, rng.integers(0, 3, 4))
    trainer.export(tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    assert model.opset_import[0].version == 13
    session = ort.InferenceSession(tmp_path / "net.onnx")
    np.testing.assert_allclose(
        np.asarray(session.run(None, {"x": x})[0]), trainer.predict(x)["y"], rtol=1e-5, atol=1e-6
    )


def test_several_steps_per_call():
    artifacts = built("classifier", opset=13, steps_per_call=2)
    assert {m.opset_import[0].version for m in artifacts.models.values()} == {13}
    assert artifacts.manifest.model("step", steps=2) is not None


def test_fixed_sizes_reach_opset_9():
    artifacts = built("classifier", opset=9, dims={"batch": 4})
    actual = trained(artifacts, (6,), "fused")
    np.testing.assert_allclose(actual, trained(built("classifier"), (6,), "fused"), rtol=2e-5)


def test_unsupported_opset_is_named():
    with pytest.raises(LoweringError) as caught:
        built("images", target="cpu", opset=13)
    first, *_, last = str(caught.value).splitlines()
    assert first == "the train model: 1 node(s) cannot be lowered to opset 13"
    assert last.startswith("hint: target='portable'")
    with pytest.raises(LoweringError, match="unknown opset: 6"):
        built("classifier", opset=6)


def test_command_line(tmp_path: Path):
    onnx.save(images(), tmp_path / "net.onnx")
    arguments = ["build", tmp_path / "net.onnx", "--loss", "cross_entropy", "-o", tmp_path / "out"]
    arguments += ["--target", "webgpu", "--opset", "13"]
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    manifest = Manifest.from_json((tmp_path / "out" / "manifest.json").read_text())
    assert manifest.options["opset"] == 13
    for spec in manifest.models:
        assert onnx.load(tmp_path / "out" / spec.file).opset_import[0].version == 13
