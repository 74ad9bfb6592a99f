"""conv_as_matmul: matmuls for small images return what Conv returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onnxtrain import optim
from onnxtrain.artifacts.build import build
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optimize.pipeline import AFTER, run
from onnxtrain.torch import from_torch
from onnxtrain.training import Trainer
from tests.cases.evaluate import stock


def _model(image: list, weight: list, bias: bool = False, **attrs: Any) -> ir.Model:
    """Relu after Conv, weights as inputs."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="small")
    op = OpBuilder(graph, "small/")
    shapes = {"x": image, "w": weight, **({"b": weight[:1]} if bias else {})}
    inputs = [op.input(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    graph.outputs.append(op.Relu(op.Conv(*inputs, **attrs)))
    return ir.Model(graph, ir_version=10)


def _spell(model: ir.Model, target: str = "cpu") -> int:
    return run(AFTER, model, OpBuilder(model.graph, "grad/", target=target))


SMALL = {
    "padded": ([3, 8, 2, 2], [5, 8, 3, 3], {"pads": [1, 1, 1, 1], "bias": True}),
    "symbolic-batch": (["n", 8, 2, 2], [5, 8, 3, 3], {"pads": [1, 1, 1, 1]}),
    "strided": (["n", 9, 4, 5], [4, 9, 3, 3], {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "uneven": ([2, 9, 4, 3], [4, 9, 2, 3], {"pads": [0, 2, 1, 0], "strides": [2, 3], "bias": True}),
    "dilated": ([2, 8, 5, 6], [4, 8, 2, 3], {"dilations": [3, 2]}),
    "one-by-one": (["n", 8, 2, 3], [4, 8, 1, 1], {"bias": True}),
    "one-by-one-strided": ([2, 8, 4, 3], [4, 8, 1, 1], {"strides": [2, 2]}),
    "sixteen-positions": ([32, 8, 4, 4], [4, 8, 3, 3], {"pads": [1, 1, 1, 1]}),
    "row": (["n", 8, 7], [4, 8, 3], {"pads": [1, 1]}),
    "solid": ([2, 8, 2, 2, 2], [4, 8, 2, 1, 2], {"pads": [1, 0, 0, 0, 0, 0]}),
    "valid": ([2, 8, 4, 4], [4, 8, 3, 3], {"auto_pad": "VALID"}),
}


@pytest.mark.parametrize("name", SMALL)
def test_matmul_equals_convolution(name: str) -> None:
    image, weight, attrs = SMALL[name]
    model = _model(image, weight, **attrs)
    proto = ir.to_proto(model)
    assert _spell(model) == 1
    product = ir.to_proto(model)
    assert "Conv" not in {n.op_type for n in product.graph.node}
    rng = np.random.default_rng(0)
    for batch in (1, 3) if image[0] == "n" else (image[0],):
        shapes = [[batch, *image[1:]], weight, weight[:1]][: len(proto.graph.input)]
        given = [rng.standard_normal(s) for s in shapes]
        np.testing.assert_allclose(stock(product)(given)[0], stock(proto)(given)[0], 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("image", "weight", "attrs"),
    [
        pytest.param([2, 8, 5, 4], [5, 8, 3, 3], {"pads": [1, 1, 1, 1]}, id="many-positions"),
        pytest.param([33, 8, 4, 4], [5, 8, 3, 3], {"pads": [1, 1, 1, 1]}, id="many-windows"),
        pytest.param(["n", 8, 4, 4], [5, 8, 3, 3], {"pads": [1, 1, 1, 1]}, id="unknown-batch"),
        pytest.param([2, 8, 4, 4], [5, 8, 1, 1], {}, id="one-by-one-of-sixteen"),
        pytest.param([2, 3, 2, 2], [5, 3, 3, 3], {"pads": [1, 1, 1, 1]}, id="few-channels"),
        pytest.param([2, 16, 2, 2], [4, 8, 1, 1], {"group": 2}, id="groups"),
        pytest.param([2, 8, "h", 2], [4, 8, 1, 1], {}, id="unknown-size"),
        pytest.param([2, 8, 2, 2], [4, 8, 3, 3], {"auto_pad": "SAME_UPPER"}, id="automatic"),
    ],
)
def test_other_convolutions_stay(image: list, weight: list, attrs: dict) -> None:
    assert _spell(_model(image, weight, **attrs)) == 0


def test_other_targets_keep_the_operator() -> None:
    model = _model([3, 8, 2, 2], [5, 8, 3, 3], pads=[1, 1, 1, 1])
    assert [_spell(model, t) for t in ("cuda", "wasm", "webgpu", "portable")] == [0] * 4


class _Net(torch.nn.Module):
    """Images of 16, 4 and 1 positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(8, 9, 3, padding=1)
        self.second = torch.nn.Conv2d(9, 10, 3, stride=2, padding=1)
        self.third = torch.nn.Conv2d(10, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return three scores."""
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).flatten(1)


@pytest.mark.parametrize("fixed", [False, True])
def test_training_follows_torch_and_shares_im2col(fixed: bool) -> None:
    net = _Net()
    x, y = torch.randn(5, 8, 4, 4), torch.tensor([0, 2, 1, 1, 0])
    model = from_torch(net, x, dynamic_batch=not fixed)
    artifacts = build(model, loss="cross_entropy", optimizer=optim.SGD(lr=0.1))
    step = onnx.load_model_from_string(Trainer(artifacts).step_models[0])
    kinds = [n.op_type for n in step.graph.node]
    # Columns of each layer serve both directions. The first has 16 positions: it is a product, too,
    # if the batch is known to be small.
    assert kinds.count("Conv") == (0 if fixed else 1)
    assert "ConvTranspose" not in kinds
    columns = [n for n in step.graph.node if n.op_type == "Gather" and n.attribute[0].i == 1]
    assert len(columns) == 3
    trainer = Trainer(artifacts)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        ours = trainer.step(x.numpy(), y.numpy())
        assert float(ours.loss) == pytest.approx(loss.item(), rel=1e-5)
