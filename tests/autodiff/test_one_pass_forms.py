"""Passes over activations that an operator made for something else saves on a GPU."""

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
    """Return the operators of a gradient, and what it gives on the CPU."""
    extra = ", float[192] scale, float[192] bias" if body == NORM else ""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{sizes}] x{extra}) => (float[{sizes}] y) {{ {body} }}"""
    wrt = ["x", "scale", "bias"] if extra else ["x"]
    made = onnxtrain.vjp(parser.parse_model(text), wrt=wrt, target=target)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {v.name: given(v.name) for v in session.get_inputs()}
    return [n.op_type for n in made.graph.node], [
        np.asarray(g) for g in session.run(None, feeds)[1:]
    ]


def given(name: str) -> np.ndarray:
    """Return the values of an input; some are far from zero."""
    rng = np.random.default_rng(len(name))
    return 3 * rng.standard_normal(PARAMETERS.get(name, SHAPE)).astype(np.float32)


def reference(body: str) -> list[np.ndarray]:
    """Return what torch gives, in float64."""
    names = ["x", "scale", "bias"] if body == NORM else ["x"]
    x = [torch.tensor(given(n), dtype=torch.float64, requires_grad=True) for n in names]
    y = F.layer_norm(x[0], (192,), x[1], x[2], 1e-3) if x[1:] else F.gelu(x[0], approximate="tanh")
    return [g.numpy() for g in torch.autograd.grad(y, x, torch.tensor(given("y_grad")).double())]


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("sizes", ["2, 6, 192", "b, s, 192"], ids=["fixed", "free"])
@pytest.mark.parametrize(
    ("body", "saved"),
    [
        (GELU, lambda kinds: kinds.count("BatchNormalization") == 2),
        (NORM, lambda kinds: sum(k.endswith("Normalization") for k in kinds) > 1),
    ],
    ids=["gelu", "norm"],
)
def test_gradients_are_those_of_torch(
    body: str, saved: Callable[[list[str]], bool], sizes: str, target: str
) -> None:
    kinds, results = result(body, sizes, target)
    fits = body == NORM or sizes[0].isdigit()
    assert saved(kinds) == (target == "cuda" and fits), kinds
    for have, want in zip(results, reference(body), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=2e-5)
