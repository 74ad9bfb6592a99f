"""dequantize_at_use: frozen quantized weights are dequantized where they are read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnxtrain

K, N = 64, 96
RNG = np.random.default_rng(0)


def _model(dtype: ir.DataType, *, turned: bool, rows: int | str) -> onnx.ModelProto:
    """Two layers, the first behind a Transpose if ``turned``."""
    xs = ir.val("x", ir.DataType.FLOAT, [rows, K])
    shape = (N, K) if turned else (K, N)
    arrays = {
        "q": RNG.integers(0, 16, shape).astype(dtype.numpy()),
        "s": (0.01 + RNG.random(shape[0])).astype(np.float32),
        "z": RNG.integers(0, 16, shape[0]).astype(dtype.numpy()),
        "w": RNG.standard_normal((N, 3)).astype(np.float32),
        "b": RNG.standard_normal(K).astype(np.float32),
    }
    kinds = {"q": dtype, "z": dtype}
    values = {
        n: ir.Value(
            name=n,
            type=ir.TensorType(kinds.get(n, ir.DataType.FLOAT)),
            shape=ir.Shape(a.shape),
            const_value=ir.Tensor(a, dtype=kinds.get(n), name=n),
        )
        for n, a in arrays.items()
    }
    tape = ir.tape.Tape()
    moved = tape.op("Add", [xs, values["b"]])
    weight = tape.op("DequantizeLinear", [values["q"], values["s"], values["z"]], {"axis": 0})
    weight = tape.op("Transpose", [weight], {"perm": [1, 0]}) if turned else weight
    y = tape.op("MatMul", [tape.op("Relu", [tape.op("MatMul", [moved, weight])]), values["w"]])
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [xs],
        [y],
        nodes=tape.nodes,
        initializers=list(values.values()),
        opset_imports={"": 21},
        name="g",
    )
    return ir.to_proto(ir.Model(graph, ir_version=10))


def _sources(graph: onnx.GraphProto, node: onnx.NodeProto) -> set[str]:
    makers = {y: n for n in graph.node for y in n.output}
    pending, seen = list(node.input), set()
    while pending:
        name = pending.pop()
        seen.add(name)
        pending += makers[name].input if name in makers else []
    return seen


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [5, "n"])
@pytest.mark.parametrize("dtype", [ir.DataType.UINT8, ir.DataType.UINT4])
def test_each_reader_dequantizes_after_its_other_operand(dtype, rows, turned) -> None:
    model = _model(dtype, turned=turned, rows=rows)
    gradients = onnxtrain.vjp(model, ["x", "b"])
    unpacking = [n for n in gradients.graph.node if n.op_type == "DequantizeLinear"]
    assert len(unpacking) == 2
    waits = [_sources(gradients.graph, n) & {"x", "y_grad"} for n in unpacking]
    assert {"x"} in waits
    assert any("y_grad" in w for w in waits)

    x = RNG.standard_normal((5, K)).astype(np.float32)
    u = RNG.standard_normal((5, 3)).astype(np.float32)
    arrays = {t.name: ir.from_proto(t).numpy() for t in model.graph.initializer}
    session = onnxruntime.InferenceSession(gradients.SerializeToString())
    y, dx, db = session.run(["y", "x_grad", "b_grad"], {"x": x, "b": arrays["b"], "y_grad": u})
    wide = (arrays["q"].astype(np.float32) - arrays["z"].astype(np.float32)[:, None]) * arrays["s"][
        :, None
    ]
    wide = wide.T if turned else wide
    h = (x + arrays["b"]) @ wide
    np.testing.assert_allclose(y, np.maximum(h, 0) @ arrays["w"], rtol=1e-3, atol=1e-3)
    want = ((u @ arrays["w"].T) * (h > 0)) @ wide.T
    np.testing.assert_allclose(dx, want, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(db, want.sum(0), rtol=1e-3, atol=1e-3)


def test_a_trainable_scale_stays() -> None:
    gradients = onnxtrain.vjp(_model(ir.DataType.UINT8, turned=False, rows="n"), ["s"])
    names = [n.input[1] for n in gradients.graph.node if n.op_type == "DequantizeLinear"]
    assert "s" in names
