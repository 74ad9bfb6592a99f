"""Gradients on GPUs that run a normalization kernel instead of several elementwise kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import parser
from torch.nn import functional as F

import onnxtrain

SHAPE = (2, 6, 192)
GELU = 'y = Gelu <approximate = "tanh"> (x)'
NORM = "y = LayerNormalization <epsilon = 0.001> (x, scale, bias)"
PARAMETERS = {"scale": (192,), "bias": (192,)}


def result(body: str, sizes: str, target: str) -> tuple[list[str], list[np.ndarray]]:
    """Return the operators of a gradient graph, and the gradients that it computes on the CPU."""
    extra = ", float[192] scale, float[192] bias" if body == NORM else ""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{sizes}] x{extra}) => (float[{sizes}] y) {{ {body} }}"""
    wrt = ["x", "scale", "bias"] if extra else ["x"]
    vjp = onnxtrain.vjp(parser.parse_model(text), wrt=wrt, target=target)
    session = onnxruntime.InferenceSession(vjp.SerializeToString())
    feeds = {v.name: input_values(v.name) for v in session.get_inputs()}
    return [n.op_type for n in vjp.graph.node], [
        np.asarray(g) for g in session.run(None, feeds)[1:]
    ]


def input_values(name: str) -> np.ndarray:
    """Return the values of an input, some of them large."""
    rng = np.random.default_rng(len(name))
    return 3 * rng.standard_normal(PARAMETERS.get(name, SHAPE)).astype(np.float32)


def reference(body: str) -> list[np.ndarray]:
    """Return torch's gradients, in float64."""
    names = ["x", "scale", "bias"] if body == NORM else ["x"]
    x = [torch.tensor(input_values(n), dtype=torch.float64, requires_grad=True) for n in names]
    y = F.layer_norm(x[0], (192,), x[1], x[2], 1e-3) if x[1:] else F.gelu(x[0], approximate="tanh")
    return [
        g.numpy() for g in torch.autograd.grad(y, x, torch.tensor(input_values("y_grad")).double())
    ]


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("sizes", ["2, 6, 192", "b, s, 192"], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("body", "uses_norm_kernel"),
    [
        (GELU, lambda kinds: kinds.count("BatchNormalization") == 2),
        (NORM, lambda kinds: sum(k.endswith("Normalization") for k in kinds) > 1),
    ],
    ids=["gelu", "norm"],
)
def test_gradients_equal_torch(
    body: str, uses_norm_kernel: Callable[[list[str]], bool], sizes: str, target: str
) -> None:
    kinds, results = result(body, sizes, target)
    applies = body == NORM or sizes[0].isdigit()
    assert uses_norm_kernel(kinds) == (target == "cuda" and applies), kinds
    for actual, expected in zip(results, reference(body), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)
