"""Loops without loop-carried states, with and without a condition."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from tests.wild import graphs as g


def _elements(loop: list[onnx.NodeProto], outputs: dict) -> onnx.ModelProto:
    """Return a model whose loop multiplies each column by a weight."""
    return g.model(
        loop,
        {"x": (3, 5, 8)},
        outputs,
        {
            "w": g.random(8, 4),
            "trip": np.int64(5),
            "go": np.bool_(True),
            "axis": np.array([1]),
        },
    )


def _steps(last: list[onnx.NodeProto], outputs: dict, inputs: list) -> onnx.GraphProto:
    counter = [g.info("i", (), g.INT64), g.info("c", (), g.BOOL)]
    take = [g.node("Gather", "x i", "xi", axis=1), g.node("MatMul", "xi w", "xw")]
    body = g.body([*take, *last], {}, [*counter, *inputs])
    body.output.append(g.info("more", (), g.BOOL))
    body.output.extend(outputs.values())
    return body


def _gradient_agrees(model: onnx.ModelProto) -> None:
    """Compare the gradient of the sum of squares with the closed form."""
    x = np.random.default_rng(4).standard_normal((3, 5, 8)).astype(np.float32)
    (y,) = g.run(model, {"x": x})
    made = onnxtrain.build(model, loss="mse", optimizer="sgd", train=["w"])
    trainer = onnxtrain.Trainer(made)
    target = np.zeros_like(y)
    gradient = trainer.gradients(x=x, target=target)["w"]
    w = ir.serde.deserialize_tensor(model.graph.initializer[0]).numpy()
    flat = x.reshape(-1, 8).astype(np.float64)
    want = 2 * flat.T @ (flat @ w) / y.size
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inputs", ["trip -", "trip go"])
def test_scan_outputs_only(inputs: str) -> None:
    same = g.node("Identity", "c", "more")
    body = _steps([same], {"xw": g.info("xw", (3, 4))}, [])
    loop = g.node("Loop", inputs, "y", body=body)
    _gradient_agrees(_elements([loop], {"y": (5, 3, 4)}))


def test_sequence_as_only_state() -> None:
    carried, grown = onnx.ValueInfoProto(name="s"), onnx.ValueInfoProto(name="t")
    for value in (carried, grown):
        value.type.sequence_type.elem_type.tensor_type.elem_type = g.FLOAT
    append = [
        g.node("Unsqueeze", "xw axis", "xu"),
        g.node("SequenceInsert", "s xu", "t"),
        g.node("Identity", "c", "more"),
    ]
    body = _steps(append, {"t": grown}, [carried])
    nodes = [
        onnx.NodeProto(op_type="SequenceEmpty", output=["empty"]),
        g.node("Loop", "trip - empty", "all", body=body),
        g.node("ConcatFromSequence", "all", "y", axis=1),
    ]
    _gradient_agrees(_elements(nodes, {"y": (3, 5, 4)}))
