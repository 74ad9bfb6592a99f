"""Verification draws values for scalar bool inputs."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxtrain

from .single import run

BRANCHES = """<ir_version: 8, opset_import: ["": 17]> g (bool c, float[2] x) => (float[2] y) {
    y = If(c) <then_branch = t () => (float[2] a) { a = Softplus(x) },
               else_branch = e () => (float[2] b) { b = Neg(x) }> }"""


@pytest.mark.parametrize("c", [False, True])
def test_an_if_with_a_bool_input_is_lowered(c: bool) -> None:
    model = onnx.parser.parse_model(BRANCHES)
    lowered = onnxtrain.lower(model, opset=11)
    feeds = {"c": np.asarray(c), "x": np.asarray([1.5, -2.0], np.float32)}
    np.testing.assert_allclose(run(lowered, feeds)[0], run(model, feeds)[0], rtol=1e-6)
