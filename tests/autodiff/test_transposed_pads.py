"""Gradients of strided convolutions run on runtimes that support symmetric padding only."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnxtrain
from onnxtrain.lowering.placement import nodes_off_gpu
from onnxtrain.runtime import session as runtime
from tests.artifacts import models
from tests.artifacts.models import finished, graph

CASES: dict[str, tuple[list[int], list[int], list[int], list[int], tuple[int, int]]] = {
    "3x3 stride 2": ([3, 3], [2, 2], [1, 1], [1, 1, 1, 1], (14, 14)),
    "odd size": ([3, 3], [2, 2], [1, 1], [1, 1, 1, 1], (15, 13)),
    "7x7 stride 2": ([7, 7], [2, 2], [1, 1], [3, 3, 3, 3], (32, 32)),
    "unread pixels": ([1, 1], [2, 2], [1, 1], [0, 0, 0, 0], (14, 14)),
    "more at the end": ([3, 3], [2, 2], [1, 1], [0, 0, 1, 1], (14, 14)),
    "more in front": ([4, 3], [1, 1], [1, 1], [2, 0, 1, 0], (9, 9)),
    "much in front": ([5, 5], [2, 2], [1, 1], [4, 4, 0, 0], (12, 12)),
    "dilated": ([3, 3], [3, 2], [2, 1], [2, 1, 2, 1], (17, 16)),
}


def conv(case: str, size: tuple[int, int] | tuple[str, str], weight: np.ndarray) -> onnx.ModelProto:
    _, strides, dilations, pads, _ = CASES[case]
    op = graph()
    x = op.input("x", ir.DataType.FLOAT, ["n", 3, *size])
    w = models.weight(op, "w", weight)
    return finished(op, y=op.Conv(x, w, strides=strides, dilations=dilations, pads=pads))


@pytest.mark.parametrize("sizes", ["known", "unknown"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_torch_and_stay_on_the_gpu(case: str, sizes: str) -> None:
    kernel, strides, dilations, pads, image = CASES[case]
    weight = np.random.default_rng(0).standard_normal((4, 3, *kernel)).astype(np.float32)
    model = conv(case, image if sizes == "known" else ("h", "w"), weight)
    gradients = onnxtrain.vjp(model, wrt=["x", "w"], target="cuda")
    assert [n for n in nodes_off_gpu(gradients, "cuda") if n.moved] == []
    x = torch.randn(2, 3, *image, requires_grad=True)
    w = torch.tensor(weight, requires_grad=True)
    padded = torch.nn.functional.pad(x, [pads[1], pads[3], pads[0], pads[2]])
    y = torch.nn.functional.conv2d(padded, w, stride=strides, dilation=dilations)
    dy = torch.randn_like(y)
    y.backward(dy)
    session = runtime.create(gradients.SerializeToString())
    values = {"x": x, "w": w, "y_grad": dy}
    feeds = {i.name: values[i.name].detach().numpy() for i in session.get_inputs()}
    dx, dw = runtime.run(session, ["x_grad", "w_grad"], feeds)
    assert x.grad is not None
    assert w.grad is not None
    np.testing.assert_allclose(dx, x.grad, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, w.grad, rtol=1e-3, atol=1e-3)
