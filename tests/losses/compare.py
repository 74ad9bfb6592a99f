"""A loss on tiny models, run on onnxruntime and compared with torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

import onnxtrain
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.losses import Loss

STANDARD = {"", "ai.onnx"}


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = session_of(model)
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def loss_model(
    loss: Loss,
    predictions: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    target: str = "cpu",
    dynamic: bool = True,
) -> onnx.ModelProto:
    """Return a model of ``y_i = 2 x_i``, their loss, its sum, and the gradients of the x_i."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="model")
    op = OpBuilder(graph, target=target)
    ys = []
    for i, x in enumerate(predictions):
        dims = [f"d{a}" if dynamic else n for a, n in enumerate(x.shape)]
        ys.append(op.Mul(op.input(f"x{i}", ir.DataType.FLOAT, dims), 2.0))
    wanted = loss.targets(ys[0])[len(predictions) - 1 :]
    assert len(wanted) == len(targets)
    inputs = []
    for i, (want, array) in enumerate(zip(wanted, targets, strict=True)):
        assert len(want.dims) == array.ndim
        inputs.append(op.input(f"t{i}", ir.DataType.from_numpy(array.dtype), want.dims))
    value = loss.build(op, *ys, *inputs)
    each = op.Identity(value)
    each.name = "each"
    total = op.Identity(value if op.rank(value) == 0 else op.ReduceSum(value, keepdims=0))
    total.name = "loss"
    graph.outputs.extend([total, each])
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    wrt = [f"x{i}" for i in range(len(predictions))]
    model = onnxtrain.grad(proto, wrt=wrt, of="loss", target=target)
    assert {n.domain for n in model.graph.node} <= STANDARD
    return model


def compare(
    loss: Loss,
    oracle: Callable[..., torch.Tensor],
    predictions: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    target: str = "cpu",
    dynamic: bool = True,
    tol: float = 2e-5,
) -> None:
    """Check value and gradients; ``oracle`` gets predictions and targets as float64 or int64."""
    model = loss_model(loss, predictions, targets, target=target, dynamic=dynamic)
    feeds = {f"x{i}": np.asarray(x, np.float32) for i, x in enumerate(predictions)}
    feeds |= {f"t{i}": t for i, t in enumerate(targets)}
    outputs = run(model, feeds)

    xs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in predictions]
    ts = [torch.tensor(t) for t in targets]
    ts = [t.double() if t.is_floating_point() else t.long() for t in ts]
    expected = oracle(*(2.0 * x for x in xs), *ts)
    expected.sum().backward()

    each = expected.detach().numpy()
    assert outputs["each"].shape == each.shape
    assert_close(outputs["each"], each, tol, "value")
    for i, x in enumerate(xs):
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        assert_close(outputs[f"x{i}_grad"], gradient.numpy(), tol, f"gradient of x{i}")


def assert_close(actual: np.ndarray, expected: np.ndarray, tol: float, what: str) -> None:
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(actual, expected, rtol=tol, atol=tol * scale, err_msg=what)
